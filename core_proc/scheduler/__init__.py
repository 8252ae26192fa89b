"""Decides what each step computes: `plan()` makes a `StepPlan`, `commit()` takes its `StepResult`."""
