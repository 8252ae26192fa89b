"""Spectrograms of Phi-4-multimodal's clips, against its feature extractor in `transformers`."""

import numpy as np
import pytest
import transformers
from tiny_whisper import RATE, waveform

from octavo.frontend.audio.phi4 import LogBands


@pytest.mark.parametrize("num_samples", [400, 559, 560, 9_000, 40_001])
def test_bands(num_samples: int) -> None:
    extractor = transformers.Phi4MultimodalFeatureExtractor()
    samples = waveform(num_samples, 3.0)[:num_samples]
    wanted = extractor(samples, sampling_rate=RATE, return_tensors="np")
    bands = LogBands(extractor)
    np.testing.assert_allclose(bands(samples), wanted["audio_input_features"][0], atol=1e-4)
    assert bands.num_rows(num_samples) == wanted["audio_embed_sizes"][0]


def test_what_has_no_frame() -> None:
    assert LogBands(transformers.Phi4MultimodalFeatureExtractor()).num_rows(399) == 0
    with pytest.raises(ValueError, match="audio_feat_stride must be 1"):
        LogBands(transformers.Phi4MultimodalFeatureExtractor(audio_feat_stride=2))
