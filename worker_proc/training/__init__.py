"""For trainers: the forward pass of an engine, in the trainer's own process. Serves nothing."""

from octavo.worker_proc.training.exact import exact_logprobs as exact_logprobs
from octavo.worker_proc.training.sampler_forward import SamplerForward as SamplerForward
