"""The example of docs/logits-processors.md as a file, for `--logits-processors`."""

from octavo import LogitsProcessor


class TargetToken(LogitsProcessor):
    """Generates nothing but `target_token`, for requests that name one."""

    @classmethod
    def validate_params(cls, sampling_params):
        target = (sampling_params.extra_args or {}).get("target_token")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target_token must be an integer, got {target!r}")

    def __init__(self, config, device, is_pin_memory):
        self.targets = {}

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.targets.pop(index, None)
        for index, params, _prompt, _output in batch_update.added:
            self.targets.pop(index, None)
            if params.extra_args and "target_token" in params.extra_args:
                self.targets[index] = params.extra_args["target_token"]
        for source, destination, _ in batch_update.moved:
            self.targets.pop(destination, None)
            if source in self.targets:
                self.targets[destination] = self.targets.pop(source)

    def apply(self, logits):
        for index, target in self.targets.items():
            kept = logits[index, target].clone()
            logits[index] = float("-inf")
            logits[index, target] = kept
        return logits
