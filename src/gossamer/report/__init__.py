"""Tables, figures and one self-contained page per run, from rows and the files of a run folder.

It knows no torch: everything here is drawn again from numbers that were written before.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
