"""Products in machine code: every form of weights, whatever the numbers of rows and threads."""

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import pytest
import torch
from emulated_tiles import use_tiles
from llvmlite import ir
from torch import Tensor

from utils.decode.engine_forward import MAX_WIDTH
from utils.engine import compiled_products, machine_code, matrix_tiles, product_code
from utils.engine.compiled_products import CompiledKernel
from utils.engine.machine_code import cpu_features
from utils.engine.weight_blocks import BlockWeight, round_int4, round_int8

ROWS = MAX_WIDTH
WIDE = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
UNIT = 2.0**-24  # the largest relative error of a rounding


def blocks(
    dtype: torch.dtype,
    bits: int,
    group: int,
    *,
    shifts: bool,
    scale_type: torch.dtype = torch.float32,
    offset: int = 0,
) -> Callable[[int, int], BlockWeight]:
    """Random integers of the whole range, with scales of many sizes."""

    def make(outputs: int, inputs: int) -> BlockWeight:
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if dtype == torch.int8 else (0, 2**bits)
        values = torch.randint(low, high, (outputs, inputs)).to(dtype)
        values[0, :2] = torch.tensor([low, high - 1])
        scales = (torch.randn(outputs, inputs // group) * 10 ** torch.rand(outputs, 1)).to(scale_type)
        return BlockWeight(values, scales, torch.randn_like(scales) if shifts else None, group, bits, offset)

    return make


def _halves(bits: int, *, shifts: bool, offset: int = 0) -> Callable[[int, int], BlockWeight]:
    kind = torch.int8 if bits == 8 else torch.uint8
    return blocks(kind, bits, 32, shifts=shifts, scale_type=torch.float16, offset=offset)


def _supers(bits: int, group: int, *, shifts: bool, offset: int = 0) -> Callable[[int, int], BlockWeight]:
    """As in K-quants: scales are small integers, times a factor for each 256 inputs."""
    kind, low = (torch.uint8, 0) if shifts else (torch.int8, -128)
    of_values = torch.uint8 if shifts or offset else torch.int8

    def make(outputs: int, inputs: int) -> BlockWeight:
        block = blocks(of_values, bits, group, shifts=shifts, offset=offset)(outputs, inputs)
        integers = [torch.randint(low, low + 256, block.scales.shape).to(kind) for _ in range(2)]
        factors = torch.randn(outputs, (1 + shifts) * inputs // 256)
        return replace(block, scales=integers[0], shifts=integers[1] if shifts else None, factors=factors)

    return make


# name: what makes a weight (N, K), N, K, the form in the kernel, bytes of a value
FORMS: dict[str, tuple[Callable[[int, int], Any], int, int, str, float]] = {
    "float32": (torch.randn, 67, 129, "float32", 4),
    "float32, one input": (torch.randn, 16, 1, "float32", 4),
    "float32, one output": (torch.randn, 1, 50, "float32", 4),
    "bfloat16": (lambda *shape: torch.randn(shape).bfloat16(), 530, 77, "bfloat16", 2),
    "bfloat16, whole tiles": (lambda *shape: torch.randn(shape).bfloat16(), 130, 96, "bfloat16", 2),
    "int8, a scale per row": (lambda *shape: round_int8(torch.randn(shape)), 50, 128, "int8", 1),
    "int8, an odd number": (lambda *shape: round_int8(torch.randn(shape)), 50, 97, "float32", 4),
    "int8 in groups of 32": (blocks(torch.int8, 8, 32, shifts=False), 40, 96, "int8", 1),
    "int8 in groups of 16": (blocks(torch.int8, 6, 16, shifts=False), 31, 48, "int8", 1),
    "uint8 in groups of 32": (blocks(torch.uint8, 5, 32, shifts=True), 40, 96, "uint8", 1),
    "uint8 in groups of 16": (blocks(torch.uint8, 8, 16, shifts=True), 17, 80, "uint8", 1),
    "4 bits": (blocks(torch.uint8, 4, 32, shifts=False), 33, 96, "uint4", 0.5),
    "4 bits, shifts": (blocks(torch.uint8, 4, 32, shifts=True), 520, 64, "uint4", 0.5),
    "4 bits in groups of 16": (blocks(torch.uint8, 3, 16, shifts=True), 48, 48, "uint4", 0.5),
    "4 bits as in Q4_0": (_halves(4, shifts=False, offset=-8), 48, 96, "uint4", 0.5),
    "5 bits as in Q5_1": (_halves(5, shifts=True), 33, 64, "uint8", 1),
    "8 bits as in Q8_0": (_halves(8, shifts=False), 40, 96, "int8", 1),
    "2 bits as in Q2_K": (_supers(2, 16, shifts=True), 40, 512, "uint4", 0.5),
    "3 bits as in Q3_K": (_supers(3, 16, shifts=False, offset=-4), 20, 768, "uint4", 0.5),
    "4 bits as in Q4_K": (_supers(4, 32, shifts=True), 40, 512, "uint4", 0.5),
    "6 bits as in Q6_K": (_supers(6, 16, shifts=False), 20, 768, "int8", 1),
    "4 bits as int4 rounds": (lambda *shape: round_int4(torch.randn(shape)), 50, 128, "uint4", 0.5),
    "4 bits, an odd group": (blocks(torch.uint8, 4, 5, shifts=False), 20, 35, "float32", 4),
}


def as_rounded(x: Tensor, size: int) -> Tensor:
    """Inputs as products find them: each group of so many in 16 bits."""
    if not size:
        return x.double()
    groups = x.unflatten(1, (-1, size))
    largest = groups.abs().amax(dim=2, keepdim=True)
    rounded = (groups * (torch.tensor(32767.0) / largest)).round().double() * (largest * (1 / 32767)).double()
    assert bool(((rounded - groups).abs() <= largest / 64000).all())
    return rounded.flatten(1)


def exact_product(weight: Tensor | BlockWeight, bias: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product in float64, and the sum of the sizes of all that is added."""
    parts = [weight.double()] if isinstance(weight, Tensor) else []
    if isinstance(weight, BlockWeight):
        spread = (weight.values.double().unflatten(1, (-1, weight.group)), torch.ones(weight.group).double())
        scales, moved = (None if part is None else part.double() for part in weight.of_groups())
        factors = (scales, weight.offset * scales + (0 if moved is None else moved))
        parts = [(part * own).flatten(1) for part, own in zip(spread, factors, strict=True)]
    bias = torch.zeros(len(parts[0])) if bias is None else bias
    sizes = sum(x.double().abs() @ part.abs().T for part in parts) + bias.double().abs()
    return x.double() @ sum(parts).T + bias.double(), sizes  # type: ignore[union-attr]


# Each kind of values and of scales. The others repeat them in other combinations.
CHOSEN = (
    *(
        "float32",
        "float32, one input",
        "bfloat16",
        "bfloat16, whole tiles",
        "int8, a scale per row",
        "int8, an odd number",
        "int8 in groups of 16",
    ),
    *("uint8 in groups of 16", "4 bits, shifts", "4 bits as in Q4_0", "4 bits as in Q4_K", "5 bits as in Q5_1"),
    *("3 bits as in Q3_K", "6 bits as in Q6_K", "4 bits, an odd group"),
)


def in_turn(names: Iterable[str]) -> list[Any]:
    """`make test` runs the chosen forms, `make test-full` all."""
    return [pytest.param(name, marks=() if name in CHOSEN else pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", in_turn(FORMS))
def test_products_are_exact_but_for_rounding_and_rows_do_not_depend_on_others(name: str) -> None:
    torch.manual_seed(len(name))
    make, outputs, inputs, kind, size = FORMS[name]
    # Biases are added in the same way in every form.
    weight, bias = make(outputs, inputs), torch.randn(outputs) if [*FORMS].index(name) % 2 else None
    kernel, x = CompiledKernel([weight], bias), torch.randn(ROWS, inputs)
    assert (kernel.form.kind, kernel.inputs, kernel.outputs) == (kind, inputs, outputs)
    assert next(kernel.tensors()).nbytes == -(-outputs // 16) * 16 * inputs * size
    values = weight.dense() if isinstance(weight, BlockWeight) else weight.float()
    assert kernel.weight().dtype == torch.float32 and torch.equal(kernel.weight(), values)
    torch.set_num_threads(1)
    alone = torch.cat([kernel(row) for row in x.split(1)])
    exact, sizes = exact_product(weight, bias, as_rounded(x, kernel.form.rounded))
    # Each value that is added is rounded once, and at most twice more for each input.
    assert bool(((alone - exact).abs() <= (inputs + 4) * UNIT * sizes).all())
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in range(1, ROWS + 1):
            assert torch.equal(kernel(x[-rows:]), alone[-rows:]), (threads, rows)
    for count in {1, min(20, outputs), outputs + 1}:
        part = kernel.first(count)
        assert torch.equal(part(x[:9]), alone[:9, :count]) and torch.equal(kernel(x[:9]), alone[:9])
        assert {own.data_ptr() for own in part.tensors()} == {own.data_ptr() for own in kernel.tensors()}


@pytest.mark.parametrize("name", in_turn(name for name in FORMS if FORMS[name][3] not in ("float32", "bfloat16")))
def test_many_rows_have_the_bits_of_few(name: str) -> None:
    torch.manual_seed(7)
    make, outputs, inputs, *_ = FORMS[name]
    kernel, x = CompiledKernel([make(outputs, inputs)], torch.randn(outputs)), torch.randn(131, inputs)
    assert torch.equal(kernel(x), torch.cat([kernel(part) for part in x.split(9)]))


def older_processor() -> Any:
    """One with AVX2, for code that this processor runs as well."""
    triple = llvm.get_default_triple()
    return llvm.Target.from_triple(triple).create_target_machine(cpu="haswell", features="", opt=3)


@pytest.mark.parametrize("feature", ["avx2", "avx512f"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "uint8 in groups of 16", "4 bits, shifts"])
def test_tiles_of_another_processor_have_the_same_bits(
    name: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of rows and blocks of a tile, and of blocks that it finds."""
    torch.manual_seed(6)
    use_tiles(monkeypatch, False)
    inputs = torch.randn(ROWS, 96)
    weights = [FORMS[name][0](outputs, 96) for outputs in (10, 50, 1080)]
    expected = [CompiledKernel([weight], None)(inputs) for weight in weights]
    monkeypatch.setattr(product_code, "cpu_features", lambda: frozenset({feature}))
    monkeypatch.setattr(compiled_products, "product_functions", cache(product_code.product_functions.__wrapped__))
    if feature == "avx2" and feature in cpu_features():
        machine = older_processor()
        monkeypatch.setattr(machine_code, "_machine", lambda: machine)
        monkeypatch.setattr(machine_code, "cpu_features", lambda: frozenset({feature}))
    for threads, (weight, every) in product((1, 3), zip(weights, expected, strict=True)):
        torch.set_num_threads(threads)
        kernel = CompiledKernel([weight], None)
        used = set()
        for rows in range(1, ROWS + 1):
            used.add(product_code.tile_of(kernel.form, rows, kernel.width // product_code.LANES)[1])
            assert torch.equal(kernel(inputs[:rows]), every[:rows]), (kernel.outputs, rows)
        if kernel.outputs > 1000 and threads == 1:
            assert used == {shape.blocks for shape in product_code.tile_shapes(kernel.form)}


FEATURES = [*machine_code._PAIR_PRODUCTS, "none"]
PAIRED = ("int8 in groups of 16", "int8, a scale per row", "4 bits, shifts", "5 bits as in Q5_1")


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        # Each feature and each form, twice at least.
        pytest.param(name, feature, marks=() if (row + column) % 2 else pytest.mark.full)
        for row, name in enumerate(PAIRED)
        for column, feature in enumerate(FEATURES)
    ],
)
def test_every_instruction_that_multiplies_pairs_gives_the_same_bits(
    name: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(8)
    use_tiles(monkeypatch, False)
    make, outputs, inputs, *_ = FORMS[name]
    weight, x = make(outputs, inputs), 5 * torch.randn(19, inputs)
    exact, sizes = exact_product(weight, None, as_rounded(x, CompiledKernel([weight], None).form.rounded))
    expected = CompiledKernel([weight], None)(x)
    # With AVX-512 processors have the instruction of "avxvnni" in another encoding.
    has = feature in cpu_features() or (feature == "avxvnni" and {"avx512vnni", "avx512vl"} <= cpu_features())
    features = frozenset({feature} if has else ())
    monkeypatch.setattr(compiled_products, "product_functions", cache(product_code.product_functions.__wrapped__))
    for module in (machine_code, product_code):
        monkeypatch.setattr(module, "cpu_features", lambda: features)
    found = CompiledKernel([weight], None)(x)
    assert torch.equal(found, expected) and bool(((found - exact).abs() <= (inputs + 4) * UNIT * sizes).all())


TILED = {  # form: N and K
    "int8, a scale per row": (50, 128),
    "int8 in groups of 32": (40, 160),
    "uint8 in groups of 32": (17, 96),
    "uint8 in groups of 16": (17, 80),
    "4 bits, shifts": (100, 320),
    "4 bits as in Q4_0": (48, 96),
    "4 bits as in Q4_K": (40, 512),
    "4 bits as int4 rounds": (50, 32),
    "5 bits as in Q5_1": (33, 256),
    "6 bits as in Q6_K": (20, 768),
}


@pytest.mark.parametrize("name", TILED)
def test_tiles_have_the_bits_of_other_instructions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated ones, and those of the processor if it has them."""
    torch.manual_seed(10)
    outputs, inputs = TILED[name]
    weight, bias, x = FORMS[name][0](outputs, inputs), torch.randn(outputs), 5 * torch.randn(37, inputs)
    x[2] *= 1e-3
    x[3:5], weight.values[:2] = 1.0, torch.tensor([[0], [2**weight.bits - 1]])  # the largest sums
    x[4, ::2] = -1.0
    own = CompiledKernel([weight], bias)
    with monkeypatch.context() as patch:
        use_tiles(patch, False)
        expected = CompiledKernel([weight], bias)(x)
    assert torch.equal(own(x), expected)
    use_tiles(monkeypatch, True)
    monkeypatch.setattr(matrix_tiles, "_LEAST_ROWS", dict.fromkeys(matrix_tiles._LEAST_ROWS, 1))
    torch.set_num_threads(1)
    kernel = CompiledKernel([weight], bias)
    assert matrix_tiles.uses_tiles(kernel.form, 1, inputs // weight.group)
    for rows in (1, 5, 16, 17, 37):
        assert torch.equal(kernel(x[:rows]), expected[:rows]), rows


def test_bfloat16_in_tiles_is_exact_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(11)
    use_tiles(monkeypatch, True)
    torch.set_num_threads(1)
    weight, bias, x = torch.randn(70, 160).bfloat16(), torch.randn(70), torch.randn(37, 160)
    x[3] *= 10 ** torch.linspace(-6, 6, 160)  # all 24 bits of each input count
    kernel = CompiledKernel([weight], bias)
    assert kernel.form.has_pairs and torch.equal(kernel.weight(), weight.float())
    assert torch.equal(kernel.rows(torch.tensor([3, 69, 16])), weight[[3, 69, 16]].float())
    exact, sizes = exact_product(weight, bias, x)
    for rows in (1, 9, 16, 17, 37):
        assert bool(((kernel(x[:rows]) - exact[:rows]).abs() <= 164 * UNIT * sizes[:rows]).all()), rows


@pytest.mark.skipif(not llvm.get_default_triple().startswith("x86_64"), reason="the instruction is one of x86")
@pytest.mark.parametrize(("processor", "feature"), [("rocketlake", "avx512vnni"), ("alderlake", "avxvnni")])
def test_products_of_pairs_are_added_in_one_instruction(
    processor: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = dict.fromkeys(["avx2", "fma", feature, *(WIDE if processor == "rocketlake" else [])], True)
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: processor)
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: llvm.targets.FeatureMap(features))
    for module in (machine_code, product_code):
        monkeypatch.setattr(module, "cpu_features", lambda: frozenset(features))
    machine, module = machine_code._machine.__wrapped__(), ir.Module("products")
    product_code._add_block_function(module, product_code.PackedForm("uint4", 32, is_group=True))
    module.triple = machine.triple
    text = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert "vpdpwssd" in text and "vpmaddwd" not in text


def test_few_rows_are_computed_without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, True)
    for name, least in {"int8, a scale per row": 6, "4 bits as in Q4_0": 6, "6 bits as in Q6_K": 9}.items():
        outputs, inputs = TILED[name]
        kernel, groups = CompiledKernel([weight := FORMS[name][0](outputs, inputs)], None), inputs // weight.group
        used = [matrix_tiles.uses_tiles(kernel.form, rows, groups) for rows in range(1, 20)]
        assert used == [False] * (least - 1) + [True] * (20 - least), name


def mapping(address: int) -> dict[str, str]:
    """What the operating system says of the memory at an address, {} if it is not mapped."""
    found = dict[str, str]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(" ")
        if not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))
            is_here = start <= address < end
        elif is_here:
            found[name] = value
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux describes its memory so")
def test_packed_weights_share_large_pages_and_are_given_back() -> None:
    torch.manual_seed(12)
    weights = [torch.randn(shape) for shape in ((30, 40), (1100, 4000), (7, 9))]
    kernels = [CompiledKernel([weight], torch.randn(len(weight))) for weight in weights]
    for kernel, weight in zip(kernels, weights, strict=True):
        assert torch.equal(kernel.weight(), weight)  # whatever was written after it
    places = [tensor.data_ptr() for kernel in kernels for tensor in kernel.tensors() if tensor.dim() == 3]
    assert len(places) == 3 and all(place % 64 == 0 for place in places)
    has_large_pages = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert all(("hg" in mapping(place)["VmFlags:"].split()) == has_large_pages for place in places)
    del kernels, kernel
    compiled_products._LARGE_PAGES._rest = torch.empty(0, dtype=torch.uint8)
    assert not mapping(places[1])


@pytest.mark.parametrize("round_weight", [round_int8, lambda weight: weight])
def test_weights_of_another_shape_need_no_new_code(round_weight: Callable[[Tensor], Any]) -> None:
    """Compiling takes longer than packing, and models have weights of many shapes."""
    CompiledKernel([round_weight(torch.randn(32, 128))], None)
    before = product_code.product_functions.cache_info().misses
    CompiledKernel([round_weight(torch.randn(48, 256))], None)
    assert product_code.product_functions.cache_info().misses == before


def test_inputs_of_any_shape_and_stride() -> None:
    torch.manual_seed(1)
    kernel, x = CompiledKernel([torch.randn(20, 24)], None), torch.randn(2, 3, 5, 24)
    expected = kernel(x.view(-1, 24))
    assert torch.equal(kernel(x), expected.view(2, 3, 5, 20)) and torch.equal(kernel(x[0, 0, 0]), expected[0])
    wide = torch.randn(9, 48)
    assert torch.equal(kernel(wide[:, 1::2]), kernel(wide[:, 1::2].contiguous()))
    assert kernel(x[:0]).shape == (0, 3, 5, 20) and kernel(torch.empty(0, 24)).shape == (0, 20)


def test_outputs_stay_as_they_are_when_the_kernel_is_used_again() -> None:
    torch.manual_seed(2)
    kernel, x = CompiledKernel([torch.randn(20, 24)], None), torch.randn(40, 5, 24)
    outputs = [kernel(part) for part in x]
    assert torch.equal(torch.cat(outputs), kernel(x.flatten(0, 1)))
    for rows in range(1, 80):  # more numbers of rows than are kept
        assert torch.equal(kernel(x.flatten(0, 1)[:rows]), torch.cat(outputs)[:rows])


def test_a_kernel_keeps_no_memory_of_its_calls() -> None:
    """Prepared inputs of a long prompt would otherwise stay in memory for each layer."""
    make, outputs, inputs, *_ = FORMS["4 bits, shifts"]
    kernel = CompiledKernel([make(outputs, inputs)], None)
    x = torch.randn(7, inputs)
    before = kernel(x)
    gc.collect()
    held = [part for part in gc.get_objects() if isinstance(part, Tensor) and part.numel() == kernel.scratch_size(7)]
    assert not held and torch.equal(kernel(x), before)
    assert torch.equal(kernel(x.bfloat16()), kernel(x.bfloat16().float()))


@pytest.mark.parametrize("name", in_turn(name for name in FORMS if name.startswith(("4 bits", "uint8"))))
def test_memory_for_many_rows_is_enough_for_fewer(name: str) -> None:
    make, outputs, inputs, *_ = FORMS[name]
    kernel = CompiledKernel([make(min(outputs, 16), inputs)], None)
    sizes = [kernel.scratch_size(rows) for rows in range(1, 200)]
    assert sizes == sorted(sizes)


def test_an_input_that_is_not_finite_stays_in_its_row() -> None:
    torch.manual_seed(3)
    for name in ("float32", "4 bits, shifts", "int8, a scale per row"):
        make, outputs, inputs, *_ = FORMS[name]
        kernel, x = CompiledKernel([make(outputs, inputs)], None), torch.randn(7, inputs)
        expected = kernel(x)
        x[3, 5] = float("nan")
        found = kernel(x)
        assert found[3].isnan().all() and torch.equal(found[[0, 1, 2, 4, 5, 6]], expected[[0, 1, 2, 4, 5, 6]])


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-35, 1e-6, 1e30])
def test_inputs_of_every_size_are_rounded(size: float) -> None:
    torch.manual_seed(9)
    for name in ("4 bits, shifts", "int8, a scale per row"):
        make, outputs, inputs, *_ = FORMS[name]
        weight, x = make(outputs, inputs), torch.randn(3, inputs)
        x[:, :64] *= size
        exact, sizes = exact_product(weight, None, x)
        assert bool(((CompiledKernel([weight], None)(x) - exact).abs() <= 1e-4 * sizes + 1e-25).all())


def columns(block: BlockWeight, first: int, last: int) -> BlockWeight:
    """The inputs from `first` up to `last`, multiples of the group unless one group has all inputs."""
    values = block.values[:, first:last]
    if block.group == block.shape[1]:
        return replace(block, values=values, group=last - first)
    groups = slice(first // block.group, last // block.group)
    shifts = None if block.shifts is None else block.shifts[:, groups]
    return replace(block, values=values, scales=block.scales[:, groups], shifts=shifts)


@pytest.mark.parametrize("sizes", [(32, 16, 48), (20, 7, 33)])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8, a scale per row", "4 bits, shifts"])
def test_weights_below_each_other_are_one_weight(name: str, sizes: tuple[int, ...]) -> None:
    """Also parts of larger ones, whose rows lie apart."""
    torch.manual_seed(5)
    whole, x = FORMS[name][0](sum(sizes), 192), torch.randn(9, 64)
    if isinstance(whole, BlockWeight):
        whole = columns(whole, 64, 128)
        ends = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        parts: list[Any] = [whole.rows(first, last) for first, last in pairwise(ends)]
    else:
        whole = whole[:, 64:128]
        parts = [*whole.split(sizes)]
    bias = torch.randn(sum(sizes))
    joined, alone = CompiledKernel(parts, bias), CompiledKernel([whole], bias)
    assert torch.equal(joined.weight(), whole.dense() if isinstance(whole, BlockWeight) else whole.float())
    assert torch.equal(joined(x), alone(x))
    if isinstance(whole, Tensor):
        assert torch.equal(CompiledKernel([whole.T.contiguous().T], bias)(x), alone(x))
