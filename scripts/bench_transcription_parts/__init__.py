"""Parts of `scripts/bench_transcription`."""
