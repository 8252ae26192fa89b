"""For trainers: the forward pass of an engine in their own process, and new weights for engines. Serves no requests."""

from octavo.worker_proc.training.exact import exact_logprobs as exact_logprobs
from octavo.worker_proc.training.sampler_forward import SamplerForward as SamplerForward
from octavo.worker_proc.training.sender import WeightSender as WeightSender
