from .cache import KVCache as KVCache
from .cache import LayerCache as LayerCache
from .core import MultiHeadAttention as MultiHeadAttention
from .core import attend as attend
from .core import causal_mask as causal_mask
