"""Audio clips of Voxtral, whose processor in `transformers` needs torch and `mistral-common`.

A clip is divided into windows; each of them has the same number of rows.
"""

from typing import Any

import numpy as np

from octavo.protocol.config.facts import MediaFacts

ARCHITECTURE = "VoxtralForConditionalGeneration"
PLACEHOLDER = "[AUDIO]"


def rows_per_window(facts: MediaFacts) -> int:
    """Return the number of prompt rows of a window of audio. 0 if the model is not Voxtral."""
    if facts.architecture != ARCHITECTURE:
        return 0
    audio: dict[str, Any] = {"max_source_positions": 1500, **facts.hf_config["audio_config"]}
    return int(audio["max_source_positions"] * audio.get("hidden_size", 1280) // audio.get("intermediate_size", 5120))


def windowed_inputs(extractor: Any, samples: Any, token_id: int, num_rows: int) -> dict[str, Any]:
    """Return what a processor of `transformers` would return for a clip; the last window is padded with silence.

    Args:
        extractor: the model's feature extractor, from `transformers`.
        samples: samples of the clip, at the extractor's rate.
        token_id: placeholder of a row.
        num_rows: number of rows of a window.
    """
    made = extractor(
        samples,
        sampling_rate=extractor.sampling_rate,
        padding=True,
        truncation=False,
        pad_to_multiple_of=extractor.n_samples,
        return_tensors="np",
    )
    (features,) = made["input_features"]
    windows = features.reshape(len(features), -1, extractor.nb_max_frames).transpose(1, 0, 2)
    num_tokens = len(windows) * num_rows
    return {
        "input_features": np.ascontiguousarray(windows, dtype=np.float32),
        "input_ids": np.full((1, num_tokens), token_id),
        "text_replacement_offsets": [[{"replacement": PLACEHOLDER * num_tokens}]],
    }
