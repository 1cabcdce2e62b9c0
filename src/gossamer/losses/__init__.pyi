from .grad_cache import GradientCache as GradientCache
from .multilabel import CoupledSoftmaxLoss as CoupledSoftmaxLoss
from .multilabel import DecoupledSoftmaxLoss as DecoupledSoftmaxLoss
from .multilabel import InBatchSoftmaxLoss as InBatchSoftmaxLoss
from .multilabel import SummedSoftmaxLoss as SummedSoftmaxLoss
from .soft_top_k import SoftTopKLoss as SoftTopKLoss
from .soft_top_k import soft_top_k as soft_top_k
from .streaming import streamed_logsumexp as streamed_logsumexp
