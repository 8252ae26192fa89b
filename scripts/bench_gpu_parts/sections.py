"""The measurements, section by section, and the targets (issue 6). `machine` defines their interface."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from bench_cpu_parts.figures import Figure, Metric, Results, Target
from bench_cpu_parts.roofline import ModelCost, model_cost
from bench_cpu_parts.session import EngineFailure
from bench_cpu_parts.workloads import Workload

from bench_gpu_parts import roofline, workloads
from bench_gpu_parts.budget import Share, Slot
from bench_gpu_parts.machine import MIXED_CHUNKS, AttentionCase, EngineName, Gpu, KernelName, Steps
from bench_gpu_parts.quantized import FORMATS, QuantizedName
from bench_gpu_parts.roofline import GpuCeilings
from bench_gpu_parts.shapes import SHAPES, ShapeName

STEP_SHAPES: tuple[ShapeName, ...] = ("Llama-3.1-8B", "Qwen3-0.6B", "Qwen2.5-7B", "Qwen3-30B-A3B")
BATCHES = (1, 8, 64, 256)
CONTEXTS = (1024, 8192)
PREFILL_TOKENS = 8192
MAIN_CASE = (64, 1024)
"""Requests and context of the decode that is also measured with top-k and top-p, and in mixed steps."""
CHUNK_TOKENS = 512
FILTERED = {"top_k": 20, "top_p": 0.95}
"""Sampling defaults of Qwen3's generation config."""
SERVED = workloads.Load(256, 1024, 128, 32.0, 30_000, {"temperature": 0.6, **FILTERED})
START_S = 25.0
"""Seconds to start a process with a model of 8 B random weights."""
STEP_CASE_S = 4.0
ATTENTION_CASE_S = 3.0
QUANTIZED_CASE_S = 1.5
QUANTIZED_ROWS = (16, 2048)
MEMORY_SHARE = 0.88
"""Fraction of the GPU's memory for weights and cache together."""

_DECODE_TARGETS = {("Llama-3.1-8B", 64, 1024): (Target("ceiling", 0.85),)}
_IDLE = Metric("idle", "GPU idle in decode, Llama-3.1-8B, 64 x 1k", "%", False, (Target("absolute", 5.0),), 1)
_HOST = Metric("host", "a step of 256 with next to no model: host time", "ms", False, digits=2)
_COST = Metric("deterministic-cost", "what deterministic mode costs", "%", False, (Target("absolute", 10.0),), 1)
_NANO = Metric(
    "nano-vllm", "nano-vllm: 256 requests, Qwen3-0.6B", "output tok/s", targets=(Target("absolute", 22e3, 27e3),)
)
_EIGHT_B = Metric("8b", "Qwen3-8B, 256 x (1,024 in, 1,024 out)", "s", False, (Target("absolute", 35.0),), 1)
PUBLISHED_ON_H200 = {"sglang-flashinfer": 30.85, "sglang-triton": 36.91, "sglang-deterministic": 43.99}
"""Seconds for the workload of `_EIGHT_B`: lmsys.org, 2025-09-22."""


@dataclass
class Run:
    """State that all sections share."""

    gpu: Gpu
    results: Results
    quick: bool = False
    """Whether only the largest and the smallest cases are measured."""
    limits: GpuCeilings | None = None
    """The result of the first section."""
    on_change: Callable[[], None] = lambda: None
    """Called after every figure and failure; writes the report."""

    def ceilings(self) -> GpuCeilings:
        """Return the measured ceilings.

        Raises:
            EngineFailure: the ceilings could not be measured.
        """
        if self.limits is None:
            raise EngineFailure("the ceilings of the GPU are not known")
        return self.limits

    def add(self, metric: Metric, column: str, value: float, share: float | None = None) -> None:
        """Record a figure and print it."""
        self.results.add(metric, column, Figure(value, share))
        told = "" if share is None else f", {share:.0%} of the ceiling"
        print(f"  {metric.title:52} {column:22} {value:12,.{metric.digits}f} {metric.unit}{told}", flush=True)
        self.on_change()

    def attempt(self, metric: Metric, column: str, measure: Callable[[], None]) -> None:
        """Run a measurement; record a failure for its cell."""
        try:
            measure()
        except EngineFailure as error:
            self.results.add(metric, column, None)
            self.results.fail(f"{column}, {metric.title}", error)
            self.on_change()


def cost_of(shape: ShapeName, num_tokens: int = 1) -> ModelCost:
    """Return the cost of a shape in 16 bits, in a step of `num_tokens` tokens.

    In a mixture of experts, the experts whose weights the step reads count; tokens are routed at random.
    """
    config = SHAPES[shape]
    cost = model_cost(config, 16)
    if (num_experts := config.get("num_experts")) is None:
        return cost
    top_k = config["num_experts_per_tok"]
    num_read = num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)
    return replace(cost, weight_bytes=model_cost({**config, "num_experts_per_tok": num_read}, 16).weight_bytes)


def measure_ceilings(run: Run, slot: Slot) -> None:
    """Measure the copy bandwidth of the GPU, and its rate of large products."""
    limits = run.limits = run.gpu.ceilings(slot.left_s())
    run.add(Metric("copy", "ceiling: copy within the GPU", "GB/s"), "octavo", limits.copy_bytes / 1e9)
    run.add(Metric("matrix", "ceiling: bfloat16 products", "TFLOP/s"), "octavo", limits.matrix_flops / 1e12)


def measure_steps(run: Run, slot: Slot) -> None:
    """Measure decode and prefill steps of every shape, in process."""
    for shape in STEP_SHAPES[:1] if run.quick else STEP_SHAPES:
        if slot.allows(f"steps of {shape}", START_S + STEP_CASE_S):
            _steps_of(run, slot, shape)


def measure_8_bit_caches(run: Run, slot: Slot) -> None:
    """Measure a decode that mostly reads keys and values, stored in 8 bits, as floats and as integers with scales."""
    for dtype, share in (("fp8", 1 / 2), ("int8", (1 + 4 / 128) / 2)):
        _decode_over_cache(run, slot, dtype, share)


def _decode_over_cache(run: Run, slot: Slot, dtype: str, share: float) -> None:
    shape: ShapeName = STEP_SHAPES[0]
    batch, context = 64, 8192
    cost = replace(cost_of(shape), kv_bytes=int(share * cost_of(shape).kv_bytes))
    title = f"decode, {dtype} cache, {shape}, {batch} x {context}"
    metric = Metric(f"decode-{dtype}-{shape}", title, "ms", False, digits=2)

    def measure() -> None:
        sizes = {"max_tokens": batch * context, "max_batch": batch}
        with run.gpu.steps(shape, **sizes, limit_s=slot.left_s(), cache_dtype=dtype) as steps:
            step_s = steps.step(batch, context, 1).step_s
            run.add(
                metric, "octavo", 1e3 * step_s, roofline.decode_seconds(cost, run.ceilings(), batch, context) / step_s
            )

    if slot.allows(metric.title, START_S):
        run.attempt(metric, "octavo", measure)


def measure_served(run: Run, slot: Slot) -> None:
    """Measure requests that arrive at random: latencies, and the fraction of time in which the GPU is idle."""
    shapes: tuple[ShapeName, ...] = ("Qwen3-0.6B", "Llama-3.1-8B")
    for shape in shapes[:1] if run.quick else shapes:
        title = f"{shape}, {SERVED.num_requests} requests, {SERVED.rate:.0f} per second"
        rate = Metric(f"served-{shape}", f"served, {title}", "output tok/s")

        def measure(shape: ShapeName = shape, rate: Metric = rate) -> None:
            served = run.gpu.serve(shape, SERVED, slot.left_s())
            run.add(rate, "octavo", served.output_tokens_per_s)
            times = {
                "first token, p99": served.ttft_p99_s,
                "gap, median": served.itl_median_s,
                "gap, p99": served.itl_p99_s,
            }
            for name, seconds in times.items():
                run.add(
                    Metric(f"served-{shape}-{name}", f"{name}, {shape}", "ms", False, digits=2), "octavo", 1e3 * seconds
                )
            idle = Metric(f"served-{shape}-idle", f"GPU idle while serving, {shape}", "%", False, digits=1)
            run.add(idle, "octavo", 100 * served.idle_share)

        if slot.allows(rate.title, START_S):
            run.attempt(rate, "octavo", measure)


def measure_host(run: Run, slot: Slot) -> None:
    """Measure the host time of a step."""

    def host() -> None:
        num_requests, context = 256, 512
        with run.gpu.steps(
            None,
            max_tokens=num_requests * context,
            max_batch=num_requests,
            limit_s=slot.left_s(),
        ) as steps:
            run.add(_HOST, "octavo", 1e3 * steps.step(num_requests, context, 1).step_s)

    if slot.allows(_HOST.title, START_S / 2):
        run.attempt(_HOST, "octavo", host)


def measure_attention(run: Run, slot: Slot) -> None:
    """Measure the attention of one layer alone, by octavo and by torch."""
    kernels: tuple[KernelName, ...] = ("octavo", "sdpa", "flex")
    cases = [AttentionCase(batch, context, 1) for batch in (64, 256, 1) for context in CONTEXTS]
    cases.insert(0, AttentionCase(1, PREFILL_TOKENS, PREFILL_TOKENS))
    for case in cases[:2] if run.quick else cases:
        for kernel in kernels:
            # Includes compilation.
            if slot.allows(f"attention by {kernel}, {case}", ATTENTION_CASE_S * (4 if kernel == "flex" else 1)):
                _attention_of(run, slot, kernel, case)
    for num_heads in () if run.quick else (16, 128):
        case = AttentionCase(64, 1024, 1, num_heads, 1, 576, key_value_dim=512)
        if slot.allows(f"latent attention of {num_heads} heads", ATTENTION_CASE_S):
            _attention_of(run, slot, "octavo", case)


def measure_quantized(run: Run, slot: Slot) -> None:
    """Measure the products of a layer with quantized weights, in a decode of 16 requests and a prompt."""
    for name in tuple(FORMATS)[:1] if run.quick else FORMATS:
        for num_rows in QUANTIZED_ROWS:
            target = (Target("ceiling", 0.75),) if num_rows == QUANTIZED_ROWS[0] else ()
            title = f"products of a layer, {name}, {num_rows} rows"
            metric = Metric(f"quantized-{name}-{num_rows}", title, "us", False, target)

            def measure(name: QuantizedName = name, num_rows: int = num_rows, metric: Metric = metric) -> None:
                seconds = run.gpu.quantized_layer(name, num_rows, slot.left_s())
                least_s = roofline.quantized_seconds(run.ceilings(), name, num_rows)
                run.add(metric, "octavo", 1e6 * seconds, least_s / seconds)

            if slot.allows(title, QUANTIZED_CASE_S):
                run.attempt(metric, "octavo", measure)


def measure_nano_vllm(run: Run, slot: Slot) -> None:
    """Measure nano-vllm's workload end to end: octavo in both modes, and transformers on the same weights."""
    seconds: dict[EngineName, float] = {}
    workload = workloads.nano_vllm()
    engines: tuple[EngineName, ...] = ("octavo", "octavo-fast", "transformers")
    for name in engines[:1] if run.quick else engines:
        if slot.allows(f"{name}, {_NANO.title}", START_S):
            least_s = roofline.workload_seconds(cost_of("Qwen3-0.6B"), run.ceilings(), workload)
            elapsed_s = _generate(run, slot, name, "Qwen3-0.6B", workload, _NANO, workloads.NANO_VLLM_TEMPERATURE)
            if elapsed_s is not None:
                seconds[name] = elapsed_s
                run.add(_NANO, name, workload.output_tokens / elapsed_s, least_s / elapsed_s)
    if {"octavo", "octavo-fast"} <= seconds.keys():
        run.add(_COST, "octavo", 100 * (seconds["octavo"] / seconds["octavo-fast"] - 1))


def measure_eight_b(run: Run, slot: Slot) -> None:
    """Measure Qwen3-8B end to end, to compare with published results for an H200."""
    workload = workloads.equal(256, 1024, 1024)
    least_s = roofline.workload_seconds(cost_of("Qwen3-8B"), run.ceilings(), workload)
    names: tuple[EngineName, ...] = ("octavo", "octavo-fast")
    for name in names:
        if slot.allows(f"{name}, {_EIGHT_B.title}", START_S + 2 * least_s):
            elapsed_s = _generate(run, slot, name, "Qwen3-8B", workload, _EIGHT_B, 0.0)
            if elapsed_s is not None:
                run.add(_EIGHT_B, name, elapsed_s, least_s / elapsed_s)
    if "H200" in run.gpu.name():
        for column, published_s in PUBLISHED_ON_H200.items():
            run.add(_EIGHT_B, column, published_s, least_s / published_s)


@dataclass(frozen=True)
class Section:
    """A part of the run."""

    key: str
    measure: Callable[[Run, Slot], None]
    share: Share


SECTIONS = (
    Section("ceilings", measure_ceilings, Share(25, 20)),
    Section("steps", measure_steps, Share(160, 50)),
    Section("8-bit caches", measure_8_bit_caches, Share(55, 0)),
    Section("host", measure_host, Share(20, 15)),
    Section("attention", measure_attention, Share(50, 15)),
    Section("quantized", measure_quantized, Share(30, 10)),
    Section("served", measure_served, Share(90, 40)),
    Section("nano-vllm", measure_nano_vllm, Share(130, 80)),
    Section("8b", measure_eight_b, Share(130, 85)),
)
TOTAL_S = 480.0
"""Time limit of a run in seconds: a call on a shared machine lasts ten minutes at most, installation included."""


def _steps_of(run: Run, slot: Slot, shape: ShapeName) -> None:
    """Measure the steps of one shape; the first failure ends the process and skips the rest."""
    cost = cost_of(shape, PREFILL_TOKENS)
    budget_bytes = MEMORY_SHARE * run.gpu.total_bytes() - cost.weight_bytes
    batches = (64,) if run.quick else BATCHES
    todo = [(batch, context) for context in CONTEXTS for batch in batches]
    fitting = [(batch, context) for batch, context in todo if batch * (context + 64) * cost.kv_bytes <= budget_bytes]
    for batch, context in sorted(set(todo) - set(fitting)):
        slot.left_out.append(
            f"decode of {shape}, {batch} x {context}: its keys and values are "
            f"{batch * context * cost.kv_bytes / 1e9:.0f} GB and do not fit"
        )
    if not fitting:
        return
    prefill = Metric(f"prefill-{shape}", f"prefill, {shape}, {PREFILL_TOKENS} tokens", "ms", False, digits=1)
    if shape == "Llama-3.1-8B":
        prefill = Metric(prefill.key, prefill.title, prefill.unit, False, (Target("ceiling", 0.70),), 1)

    def measure() -> None:
        with run.gpu.steps(
            shape,
            max_tokens=max(batch * context for batch, context in fitting) + MIXED_CHUNKS * CHUNK_TOKENS,
            max_batch=max(batches) + 1,
            limit_s=slot.left_s(),
        ) as steps:
            _prefill(run, steps, prefill, cost)
            for batch, context in fitting:
                if slot.allows(f"decode of {shape}, {batch} x {context}", STEP_CASE_S):
                    _decode(run, steps, shape, batch, context)
            if MAIN_CASE in fitting and slot.allows(f"mixed steps of {shape}", STEP_CASE_S):
                _mixed(run, steps, shape)

    run.attempt(prefill, "octavo", measure)


def _prefill(run: Run, steps: Steps, metric: Metric, cost: ModelCost) -> None:
    least_s = roofline.prefill_seconds(cost, run.ceilings(), PREFILL_TOKENS)
    step_s = steps.step(1, PREFILL_TOKENS, PREFILL_TOKENS).step_s
    run.add(metric, "octavo", 1e3 * step_s, least_s / step_s)


def _decode(run: Run, steps: Steps, shape: ShapeName, batch: int, context: int) -> None:
    targets = _DECODE_TARGETS.get((shape, batch, context), ())
    metric = Metric(
        f"decode-{shape}-{batch}-{context}", f"decode, {shape}, {batch} x {context}", "ms", False, targets, 2
    )
    time = steps.step(batch, context, 1, asks_busy=bool(targets))
    least_s = roofline.decode_seconds(cost_of(shape, batch), run.ceilings(), batch, context)
    run.add(metric, "octavo", 1e3 * time.step_s, least_s / time.step_s)
    if time.busy_s is not None:
        run.add(_IDLE, "octavo", 100 * max(0.0, 1 - time.busy_s / time.step_s))
    if (batch, context) == MAIN_CASE:
        filtered = Metric(f"{metric.key}-filtered", f"{metric.title}, top-k and top-p", "ms", False, digits=2)
        step_s = steps.step(batch, context, 1, sampling=FILTERED).step_s
        run.add(filtered, "octavo", 1e3 * step_s, least_s / step_s)


def _mixed(run: Run, steps: Steps, shape: ShapeName) -> None:
    """Measure decodes together with a prompt chunk, and the GPU's wait for the host."""
    batch, context = MAIN_CASE
    name = f"{shape}, {batch} x {context} and a chunk of {CHUNK_TOKENS}"
    time = steps.mixed_step(batch, context, CHUNK_TOKENS)
    least_s = roofline.mixed_seconds(cost_of(shape, batch + CHUNK_TOKENS), run.ceilings(), batch, context, CHUNK_TOKENS)
    metric = Metric(f"mixed-{shape}", f"mixed step, {name}", "ms", False, digits=2)
    run.add(metric, "octavo", 1e3 * time.step_s, least_s / time.step_s)
    if time.busy_s is not None:
        idle = Metric(f"mixed-idle-{shape}", f"GPU idle, {name}", "%", False, (Target("absolute", 15.0),), 1)
        run.add(idle, "octavo", 100 * max(0.0, 1 - time.busy_s / time.step_s))


def _attention_of(run: Run, slot: Slot, kernel: KernelName, case: AttentionCase) -> None:
    if case.key_value_dim is not None:
        limits, name = run.ceilings(), f"{case.num_heads} heads, decode, {case.batch} x {case.context}"
        num_keys = case.batch * case.context
        flops = 2.0 * num_keys * case.num_heads * (case.head_dim + case.key_value_dim)
        least_s = max(2 * num_keys * case.head_dim / limits.copy_bytes, flops / limits.matrix_flops)
        key = f"latent-{case.num_heads}-{case.batch}-{case.context}-{case.num_tokens}"
        metric = Metric(key, f"latent attention, {name}", "us", False)
    elif case.num_tokens > 1:
        least_s = roofline.prefill_attention_seconds(run.ceilings(), case.context, case.num_heads, case.head_dim)
        metric = Metric("attention-prefill", f"attention, prefill of {case.context}", "us", False)
    else:
        least_s = roofline.decode_attention_seconds(
            run.ceilings(), case.batch, case.context, case.num_kv_heads, case.head_dim
        )
        name = f"{case.batch} x {case.context}"
        metric = Metric(f"attention-{case.batch}-{case.context}", f"attention, decode, {name}", "us", False)

    def measure() -> None:
        seconds = run.gpu.attention(kernel, case, slot.left_s())
        run.add(metric, kernel, 1e6 * seconds, least_s / seconds)

    run.attempt(metric, kernel, measure)


def _generate(
    run: Run, slot: Slot, name: EngineName, shape: ShapeName, workload: Workload, metric: Metric, temperature: float
) -> float | None:
    """Return the seconds of a run after a small warm-up run; `None` if it failed."""
    max_model_len = max(map(len, workload.prompts)) + max(workload.max_tokens) + 8
    try:
        with run.gpu.engine(
            name, shape, temperature=temperature, max_model_len=max_model_len, limit_s=slot.left_s()
        ) as engine:
            engine.generate(workloads.equal(256, 128, 16), slot.left_s())
            return engine.generate(workload, slot.left_s())
    except EngineFailure as error:
        run.results.add(metric, name, None)
        run.results.fail(f"{name}, {metric.title}", error)
        return None
