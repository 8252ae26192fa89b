"""The next token of every row of logits, by its request's own parameters, in one native call.

There is no arithmetic of its own here, only an order: logit bias, tokens withheld until `min_tokens` and those that
would complete a bad word, penalties, and the mask of the allowed tokens, which beats them all; then greedy requests
take the most likely token, and the others temperature, min_p, top_k, top_p and noise. The parts are the operations
`penalties`, `token_mask`, `filter_logits`, `top_k` and `gumbel_sample`, whose references say what is meant; through
torch, `octavo.worker_proc.sampling` calls them one by one. Holds no state of a request: a `SampledRequest` points to
what its owner keeps.
"""

from octavo.kernels.sample.native import NativeSampler as NativeSampler
from octavo.kernels.sample.native import SampledRequest as SampledRequest
