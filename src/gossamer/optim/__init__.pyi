from .schedules import warmup_cosine as warmup_cosine
