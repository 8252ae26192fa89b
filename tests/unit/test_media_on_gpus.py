"""Which models that read media run on GPUs, and why others are refused."""

import pytest

from octavo.protocol.config.media import _ON_GPUS, _ONLY_ON_CPUS, _check_gpu
from octavo.protocol.errors import ConfigError
from octavo.worker_proc.models.vision.registry import AUDIO_ENCODERS, TOWERS


def test_every_tower_runs_there_or_is_refused_with_a_reason() -> None:
    assert {*TOWERS, *AUDIO_ENCODERS} == _ON_GPUS | set(_ONLY_ON_CPUS)
    assert not _ON_GPUS & set(_ONLY_ON_CPUS)


def test_refusals_name_the_model_and_the_reason() -> None:
    for architecture, reason in {**_ONLY_ON_CPUS, "NewForConditionalGeneration": "has not been tried there"}.items():
        with pytest.raises(ConfigError, match=f"{architecture} does not run on GPUs: it {reason}"):
            _check_gpu(architecture)


def test_a_tower_that_was_compared_runs() -> None:
    _check_gpu("Qwen2VLForConditionalGeneration")
