from .block import TransformerBlock as TransformerBlock
from .block import build_feed_forward as build_feed_forward
from .decoder import Decoder as Decoder
from .generation import CausalModel as CausalModel
from .generation import generate as generate
from .saving import PretrainedModel as PretrainedModel
