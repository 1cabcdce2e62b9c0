"""Models: small, saved as plain folders, with position encodings that one can choose."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
