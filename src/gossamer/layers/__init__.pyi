from .feed_forward import ACTIVATIONS as ACTIVATIONS
from .feed_forward import FeedForward as FeedForward
from .feed_forward import GatedFeedForward as GatedFeedForward
from .residual import Residual as Residual
