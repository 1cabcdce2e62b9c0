"""Research on big models and big matrices as software: pieces, jobs, checked claims.

Nothing here loads torch: a sub-package is imported when it is first named
(`gossamer.positions`), and its classes when they are first used. The library never sends
anything anywhere and needs no network after installation.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
