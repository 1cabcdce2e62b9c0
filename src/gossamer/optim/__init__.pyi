from .scale_invariant_sgd import ScaleInvariantSGD as ScaleInvariantSGD
from .scale_invariant_sgd import clip_grad_relative_ as clip_grad_relative_
from .schedules import step_decay as step_decay
from .schedules import switch_at as switch_at
from .schedules import warmup_cosine as warmup_cosine
from .schedules import warmup_linear as warmup_linear
