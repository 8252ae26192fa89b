"""The model of an engine with a trainer's weights: its logprobs are those of the engine, bit for bit.

An engine gives a request the same bits in any batch, in any chunks and after any crash. So computing one sequence alone
with the same kernels gives the logprobs with which its tokens were drawn.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from octavo.kernels.native.build import silent
from octavo.protocol.config import ResolvedConfig
from octavo.protocol.env import Env
from octavo.protocol.errors import ConfigError
from octavo.protocol.params import SamplingSpec
from octavo.worker_proc.batch.inputs import GroupInputs, StepInputs
from octavo.worker_proc.kernels import open_kernels
from octavo.worker_proc.models.registry import build_model
from octavo.worker_proc.parallel.placement import Placement
from octavo.worker_proc.parallel.sharding import Sharding
from octavo.worker_proc.runners.host import HostRunner
from octavo.worker_proc.runners.registry import open_runner
from octavo.worker_proc.weights.load import packer_of, torch_dtype


class SamplerForward:
    """Computes logprobs with an engine's kernels. Call `load` first, and again after each change of the weights.

    Args:
        config: the engine's `EngineFacts.config`: `llm.client.facts.config`.

    Raises:
        ConfigError: the engine does not compute on a CPU with native kernels, or its model has recurrent states.
    """

    def __init__(self, config: bytes) -> None:
        engine = msgspec.msgpack.decode(config, type=ResolvedConfig)
        # One worker has the same bits as several.
        self._config = replace(
            engine, world_size=1, pipeline_parallel_size=1, data_parallel_size=1, enable_expert_parallel=False
        )
        library = None
        if engine.device == "cpu":
            library = open_kernels(replace(self._config, cpu_binding="none"), Env.read(), silent)
        if library is None:
            raise ConfigError(
                f"the engine computes on {engine.device} with {engine.cpu_kernels} kernels; a trainer has its bits "
                "only on a CPU with native kernels",
                hint="compute importance weights from the logprobs that the engine returns",
            )
        self._library = library
        self._runner: HostRunner | None = None

    @torch.inference_mode()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy all weights, converted to the engine's type and packed as the engine packs them.

        Args:
            tensors: tensors of the checkpoint, by the names of Hugging Face, such as `model.state_dict().items()`.

        Raises:
            ConfigError: a tensor is missing, unexpected, or of another shape; or the model has recurrent states.
        """
        config = self._config
        self._runner = None  # frees its memory before the new runner allocates as much
        model = build_model(config.model, Placement(torch_dtype(config), sharding=Sharding.of(config, 0)))
        if model.state_group is not None:
            raise ConfigError(f"{config.model.architecture} has recurrent states", hint="train a model without them")
        model.library = self._library
        packer = packer_of(config, model.device, self._library)
        model.load_weights(((name, tensor.detach()) for name, tensor in tensors), packer)
        model.pack(packer)
        self._num_groups = len(model.cache_groups)
        self._num_blocks = -(-config.max_model_len // config.block_size)
        num_blocks = self._num_blocks * self._num_groups
        runner = open_runner(model, config, None, num_blocks=num_blocks, max_model_len=config.max_model_len)
        assert isinstance(runner, HostRunner), "the host computes"
        self._runner = runner

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logprob of each token but the first, given those before it, float32: the engine's raw logprobs.

        Args:
            token_ids: a prompt and its output.

        Raises:
            ValueError: there are fewer than two tokens, or more than the engine takes.
        """
        assert self._runner is not None, "load the weights first"
        if not 2 <= len(token_ids) <= self._config.max_model_len:
            raise ValueError(f"{len(token_ids)} tokens; the engine takes 2 to {self._config.max_model_len}")
        spec = SamplingSpec(max_tokens=1, seed=0, prompt_logprobs=0)
        found: list[float] = []
        last = len(token_ids) - 1
        for start in range(0, last, self._config.max_num_batched_tokens):
            end = min(start + self._config.max_num_batched_tokens, last)
            self._runner.forward.run(self._step(token_ids, start, end))
            rows = self._runner.prompt_logprobs(spec, token_ids[start + 1 : end + 1], 0, start + 1).rows()
            found += [row.token_logprob for row in rows]
        return torch.tensor(found, dtype=torch.float32)

    def _step(self, token_ids: Sequence[int], start: int, end: int) -> StepInputs:
        """Return the step that computes positions [start, end) of the only request."""
        positions = np.arange(start, end)
        tables = np.arange(self._num_groups * self._num_blocks, dtype=np.int32).reshape(self._num_groups, 1, -1)
        size = self._config.block_size
        groups = [
            GroupInputs(table[0, positions // size].astype(np.int64) * size + positions % size, table)
            for table in tables
        ]
        return StepInputs(
            token_ids_T=np.array(token_ids[start:end], dtype=np.int64),
            positions_T=positions,
            query_starts=np.array([0, end - start]),
            context_lens=np.array([end]),
            slots_T=np.zeros(end - start, dtype=np.int64),
            groups=tuple(groups),
        )
