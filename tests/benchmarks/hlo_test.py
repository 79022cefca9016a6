"""The HLO reader on programs whose products, collectives and loops are counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.compiled_parts.collectives import collectives
from benchmarks.compiled_parts.copies import CONVERTED, COPIED, STACKED, Copy, copies
from benchmarks.compiled_parts.flops import compiled_flops
from benchmarks.compiled_parts.hlo import Array, in_scope, names_of_this_code, parse, walk
from benchmarks.compiled_parts.traffic import memory_traffic, read_again
from benchmarks.compiled_parts.trips import expert_blocks
from dcmdp_jax.models.ops.blocks import grouped_matmul
from dcmdp_jax.parallel.mesh import make_mesh


def _mesh():
    return make_mesh(1, 8, devices=jax.devices()[:8])


def _module(function, *arguments):
    with names_of_this_code():
        return parse(jax.jit(function).lower(*arguments).compile().as_text())


def _shape(*dims, spec=None):
    sharding = None if spec is None else NamedSharding(_mesh(), spec)
    return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=sharding)


def _none(op_name):
    return None


def test_a_loop_of_known_length_counts_its_body_that_often():
    def function(x, kernels):
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)[0]

    # Five products of [3, 7] and [7, 7]: 5 x 2 x 3 x 7 x 7. A cost analysis that counts the body
    # once says 294.
    flops = compiled_flops(_module(function, _shape(3, 7), _shape(5, 7, 7)), _none)
    assert (flops.products, flops.attention) == (5 * 294, 0)


def test_loops_inside_loops_multiply():
    def function(x, kernel):
        inner = lambda _, x: jnp.tanh(x @ kernel)  # noqa: E731
        return jax.lax.fori_loop(0, 4, lambda _, x: jnp.sin(jax.lax.fori_loop(0, 3, inner, x)), x)

    assert compiled_flops(_module(function, _shape(3, 7), _shape(7, 7)), _none).products == 12 * 294


# As the compiler for TPUs writes a product of shards that arrive in turn: two of sixteen in each of
# eight halves.
_UNROLLED = """HloModule unrolled
%body (carried: (u32[], f32[3,7], f32[7,7])) -> (u32[], f32[3,7], f32[7,7]) {
  %carried = (u32[], f32[3,7], f32[7,7]) parameter(0)
  %counter = u32[]{:T(128)} get-tuple-element(%carried), index=0
  %x = f32[3,7]{1,0:T(8,128)} get-tuple-element(%carried), index=1
  %kernel = f32[7,7]{1,0:T(8,128)} get-tuple-element(%carried), index=2
  %first = f32[3,7]{1,0} dot(%x, %kernel), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %second = f32[3,7]{1,0} dot(%first, %kernel), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %two = u32[]{:T(128)} constant(2)
  %moved = u32[]{:T(128)S(6)} add(%counter, %two)
  %copied = u32[]{:T(128)} copy(%moved)
  ROOT %tuple = (u32[], f32[3,7], f32[7,7]) tuple(%copied, %second, %kernel)
}
%condition (carried: (u32[], f32[3,7], f32[7,7])) -> pred[] {
  %carried = (u32[], f32[3,7], f32[7,7]) parameter(0)
  %counter = u32[]{:T(128)} get-tuple-element(%carried), index=0
  %bound = u32[]{:T(128)} constant(7)
  ROOT %less = pred[] compare(%counter, %bound), direction=LT
}
ENTRY %main (given: (u32[], f32[3,7], f32[7,7])) -> (u32[], f32[3,7], f32[7,7]) {
  %given = (u32[], f32[3,7], f32[7,7]) parameter(0)
  ROOT %while = (u32[], f32[3,7], f32[7,7]) while(%given), condition=%condition, body=%body
}
"""


def test_a_loop_that_counts_by_two_runs_half_as_often():
    # 0, 2, 4, 6 are below 7: four iterations of two products.
    assert compiled_flops(parse(_UNROLLED), _none).products == 4 * 2 * 294


def test_a_loop_whose_end_is_data_has_the_stated_length():
    def function(x, kernel, count):
        with jax.named_scope("outer/tokens"):
            return jax.lax.fori_loop(0, count, lambda _, x: jnp.tanh(x @ kernel), x)

    module = _module(function, _shape(3, 7), _shape(7, 7), jax.ShapeDtypeStruct((), jnp.int32))
    stated = compiled_flops(module, lambda op_name: 9 if in_scope(op_name, "tokens") else None)
    assert stated.products == 9 * 294
    # Without a word about it the body counts once, and the loop is told.
    assert compiled_flops(module, _none).products == 294
    assert {loop.known for visit in walk(module) for loop in visit.loops} == {False}


def test_a_program_that_was_kept_under_another_name_is_not_taken():
    """The compile cache tells programs apart without their names: what is counted is by their own."""

    def program(scope):
        def function(x, kernel, count):
            with jax.named_scope(scope):
                return jax.lax.fori_loop(0, count, lambda _, x: jnp.cos(x @ kernel), x)

        return function

    shapes = _shape(3, 7), _shape(7, 7), jax.ShapeDtypeStruct((), jnp.int32)
    jax.jit(program("before")).lower(*shapes).compile()
    stated = compiled_flops(
        _module(program("now"), *shapes), lambda op_name: 9 if in_scope(op_name, "now") else None
    )
    assert stated.products == 9 * 294


def test_products_with_a_batch_axis():
    def function(x, y):
        return jnp.einsum("bij,bkj->bik", x, y)

    # Four products of [3, 5] and [5, 6]: 4 x 2 x 3 x 5 x 6.
    assert (
        compiled_flops(_module(function, _shape(4, 3, 5), _shape(4, 6, 5)), _none).products == 720
    )


_REDUCTION = """HloModule jit_f, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[3,4], y: f32[5]) -> (f32[3,4], f32[5]) {
  %x = f32[3,4]{1,0} parameter(0)
  %y = f32[5]{0} parameter(1)
  ROOT %r = (f32[3,4]{1,0}, /*index=1*/f32[5]{0}) all-reduce(%x, /*index=1*/%y), replica_groups=GROUPS, to_apply=%add
}
"""


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4),
        ("[4,2]<=[8]", 2),
        ("[1,8]<=[8]", 8),
        ("mesh['a'=2,'b'=4] {'b'}", 4),
        ("mesh['a'=2,'b'=4] {'a','b'}", 8),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", 2),
        ("{}", 8),
    ],
)
def test_every_spelling_of_groups(groups, size):
    found = collectives(
        parse(_REDUCTION.replace("GROUPS", groups)), _none, micro_batch_scope="micro_batches"
    )
    # One collective of two arrays, as the compiler combines small ones.
    assert [(one.array.dims, one.devices) for one in found] == [((3, 4), size), ((5,), size)]


_CONVOLUTION = """HloModule jit_f, num_partitions=1

ENTRY %main (a: bf16[8,512,64], b: bf16[8,64,256]) -> bf16[8,512,256] {
  %a = bf16[8,512,64]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[8,64,256]{2,1,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = bf16[8,512,256]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf
}
"""


def test_a_batched_product_that_a_tpu_writes_as_a_dilated_convolution():
    # lhs_dilate 8 spreads 8 elements over 57 places; stride 7 and 8 taps: output o meets places 7 o
    # .. 7 o + 7, of which one is a multiple of 8. So 8 pairs, each a product of [512, 64] and [64,
    # 256].
    assert compiled_flops(parse(_CONVOLUTION), _none).products == 8 * 2 * 512 * 64 * 256


# The custom calls of megablox, compiled for a v5e: forward, the experts' gradient, the rows'.
_GROUPED = """HloModule jit_f, num_partitions=1

ENTRY %main (x: bf16[1024,256], k: bf16[8,256,384], y: bf16[1024,384], g: s32[9]) -> bf16[1024,256] {
  %x = bf16[1024,256]{1,0} parameter(0)
  %k = bf16[8,256,384]{2,1,0} parameter(1)
  %y = bf16[1024,384]{1,0} parameter(2)
  %g = s32[9]{0} parameter(3)
  %a = bf16[1024,384]{1,0:T(8,128)} custom-call(%g, %g, %x, %k), KERNEL="jit(loss)/jvp(jit(gmm))/pallas_call"}
  %b = bf16[8,256,384]{2,1,0} custom-call(%g, %x, %y), KERNEL="jit(loss)/transpose(jvp(jit(tgmm)))/pallas_call"}
  ROOT %c = bf16[1024,256]{1,0} custom-call(%g, %y, %k), KERNEL="jit(loss)/transpose(jvp(jit(gmm)))/pallas_call"}
}
""".replace("KERNEL", 'custom_call_target="tpu_custom_call", metadata={op_name')


def test_grouped_products_of_experts():
    # Each row is multiplied by one expert's [256, 384]: 2 x 1024 x 256 x 384, three times.
    flops = compiled_flops(parse(_GROUPED), _none)
    assert (flops.products, flops.attention, flops.uncounted) == (3 * 201_326_592, 0, ())


def test_blocks_of_experts_count_as_many_as_there_may_be():
    def function(x, kernels, sizes):
        return grouped_matmul(x, kernels, sizes)

    shapes = _shape(64, 5), _shape(4, 5, 3), jax.ShapeDtypeStruct((4,), jnp.int32)
    # 64 rows of 4 experts in blocks of 32: two full ones, and one for each expert's rest at most.
    flops = compiled_flops(_module(function, *shapes), expert_blocks)
    assert flops.products == (64 // 32 + 4) * 2 * 32 * 5 * 3


def test_a_gather_in_a_loop():
    mesh = _mesh()

    def function(x, kernels):
        def layer(x, kernel):
            whole = jax.lax.with_sharding_constraint(kernel, NamedSharding(mesh, P()))
            return jnp.tanh(x @ whole), None

        return jax.lax.scan(layer, x, kernels)[0]

    module = _module(
        function, _shape(16, 24, spec=P("fsdp")), _shape(5, 24, 24, spec=P(None, "fsdp"))
    )
    assert module.devices == 8
    (gather,) = [one for one in collectives(module, _none, micro_batch_scope="micro_batches")]
    assert (gather.kind, gather.array.size, gather.devices, gather.count) == (
        "all-gather",
        24 * 24,
        8,
        5,
    )
    # Each device receives 7/8 of a [24, 24] float32, five times.
    assert gather.received_bytes == 5 * 24 * 24 * 4 * 7 / 8
    assert not gather.in_micro_batch
    # A device has 2 of the 16 rows.
    assert compiled_flops(module, _none).products == 5 * 2 * 2 * 24 * 24


def test_a_reduction_inside_the_loop_over_micro_batches():
    def function(x, count):
        def body(_, total):
            return total + jnp.sum(x * total[0])

        with jax.named_scope("micro_batches/bucket_0"):
            return jax.lax.fori_loop(0, count, body, jnp.zeros(3))

    module = _module(function, _shape(16, 24, spec=P("fsdp")), jax.ShapeDtypeStruct((), jnp.int32))
    trips = lambda op_name: 6 if in_scope(op_name, "micro_batches") else None  # noqa: E731
    (reduction,) = collectives(module, trips, micro_batch_scope="micro_batches")
    assert (reduction.kind, reduction.array, reduction.count) == ("all-reduce", Array("f32", ()), 6)
    # Half of the bytes to add up, half to tell: 2 x 7/8 x 4 bytes.
    assert reduction.in_micro_batch and reduction.received_bytes == 6 * 7


def test_groups_of_devices():
    mesh = make_mesh(2, 4, devices=jax.devices()[:8])

    def function(x):
        return jax.shard_map(
            lambda x: jax.lax.psum(x, "fsdp"),
            mesh=mesh,
            in_specs=P(("data", "fsdp")),
            out_specs=P("data"),
        )(x)

    module = _module(function, jax.ShapeDtypeStruct((8, 6), jnp.float32))
    (reduction,) = collectives(module, _none, micro_batch_scope="micro_batches")
    assert reduction.devices == 4 and reduction.received_bytes == 2 * 3 / 4 * 6 * 4


def test_memory_traffic_of_a_product_and_of_a_slice():
    # Two operands read, one result written, by hand 4 x (3 x 7 + 7 x 5 + 3 x 5).
    module = _module(lambda x, y: x @ y, _shape(3, 7), _shape(7, 5))
    assert memory_traffic(module, _none) == 4 * (21 + 35 + 15)

    # A scan reads the layer's slice of the stacked kernels, not all 50 of them.
    def function(x, kernels):
        return jax.lax.scan(lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels)[0]

    once = 4 * 50 * 64 * 64
    assert (
        once
        < memory_traffic(_module(function, _shape(1, 64), _shape(50, 64, 64)), _none)
        < 4 * once
    )


# A loop over four layers, with the tables of Python's lines as the compiler for GPUs writes them.
_STACKS = """HloModule stacks, num_partitions=1

FileNames
1 "/home/me/dcmdp_jax/models/layers.py"

FunctionNames
1 "kernel_matmul"

FileLocations
1 {file_name_id=1 function_name_id=1 line=50 end_line=50 column=8 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%sliced (stack: f32[4,8,16], i: s32[]) -> f32[1,8,16] {
  %stack = f32[4,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,8,16]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,8,16}
}
%cast (stack: f32[4,8,16], i: s32[]) -> bf16[1,8,16] {
  %stack = f32[4,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,8,16]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,8,16}
  ROOT %converted = bf16[1,8,16]{2,1,0} convert(%slice)
}
%written (stack: f32[4,8,16], part: bf16[1,8,16], i: s32[]) -> f32[4,8,16] {
  %stack = f32[4,8,16]{2,1,0} parameter(0)
  %part = bf16[1,8,16]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %wide = f32[1,8,16]{2,1,0} convert(%part)
  %square = f32[1,8,16]{2,1,0} multiply(%wide, %wide)
  ROOT %update = f32[4,8,16]{2,1,0} dynamic-update-slice(%stack, %square, %i, %zero, %zero)
}
%body (carried: (s32[], f32[4,8,16])) -> (s32[], f32[4,8,16]) {
  %carried = (s32[], f32[4,8,16]) parameter(0)
  %i = s32[] get-tuple-element(%carried), index=0
  %stack = f32[4,8,16]{2,1,0} get-tuple-element(%carried), index=1
  %a = f32[1,8,16]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%sliced, metadata={op_name="jit(f)/while/dynamic_slice"}
  %b = bf16[1,8,16]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%cast, metadata={op_name="jit(f)/mul" stack_frame_id=1}
  %c = f32[4,8,16]{2,1,0} fusion(%stack, %b, %i), kind=kLoop, calls=%written, metadata={stack_frame_id=1}
  ROOT %out = (s32[], f32[4,8,16]) tuple(%i, %c)
}
%condition (carried: (s32[], f32[4,8,16])) -> pred[] {
  %carried = (s32[], f32[4,8,16]) parameter(0)
  ROOT %go = pred[] constant(true)
}
ENTRY %main (given: (s32[], f32[4,8,16])) -> f32[4,8,16] {
  %given = (s32[], f32[4,8,16]) parameter(0)
  %while = (s32[], f32[4,8,16]) while(%given), condition=%condition, body=%body, TRIPS
  %stack = f32[4,8,16]{2,1,0} get-tuple-element(%while), index=1
  ROOT %whole = f32[4,8,16]{2,1,0} copy(%stack)
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"4"}}')


def test_copies_casts_and_slices_of_stacks():
    found = list(copies(parse(_STACKS), _none))
    # A layer is 8 x 16 float32, 512 bytes, and an index 4. Four times: read and written; read and
    # written as bfloat16; written, where its product is read and written too. The stack itself,
    # 2,048 bytes, is read and written once.
    assert found == [
        Copy(COPIED, Array("f32", (1, 8, 16)), 4 * (512 + 512 + 4), "dynamic_slice"),
        Copy(CONVERTED, Array("bf16", (1, 8, 16)), 4 * (512 + 256 + 4), "models/layers.py:50 mul"),
        Copy(STACKED, Array("f32", (4, 8, 16)), 4 * 512, "models/layers.py:50"),
        Copy(COPIED, Array("f32", (4, 8, 16)), 2 * 2048, "the compiler"),
    ]
    # What computes reads its 256 bytes too.
    assert memory_traffic(parse(_STACKS), _none) == 4 * (1028 + 772 + 256 + 512 + 4) + 4096


def test_a_slice_of_what_is_elementwise_reads_the_slice():
    text = """HloModule chosen, num_partitions=1
%chosen (x: f32[64,32], i: s32[]) -> f32[1,32] {
  %x = f32[64,32]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %e = f32[64,32]{1,0} exponential(%x)
  ROOT %slice = f32[1,32]{1,0} dynamic-slice(%e, %i, %zero), dynamic_slice_sizes={1,32}
}
ENTRY %main (x: f32[64,32], i: s32[]) -> f32[1,32] {
  %x = f32[64,32]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %out = f32[1,32]{1,0} fusion(%x, %i), kind=kLoop, calls=%chosen
}
"""
    # 128 bytes read and written, 4 of the index; not the 8,192 of the array. Of a product all would
    # be read.
    assert memory_traffic(parse(text), _none) == 128 + 128 + 4
    mixed = text.replace("exponential(%x)", "dot(%x, %x)")
    assert memory_traffic(parse(mixed), _none) == 8192 + 128 + 4


def test_a_part_of_a_sum_reads_its_own_addends():
    text = """HloModule parts, num_partitions=1
%summed (x: f32[2,64,32], z: f32[]) -> f32[64,8] {
  %x = f32[2,64,32]{2,1,0} parameter(0)
  %z = f32[] parameter(1)
  %sum = f32[64,32]{1,0} reduce(%x, %z), dimensions={0}, to_apply=%add
  ROOT %part = f32[64,8]{1,0} slice(%sum), slice={[0:64], [0:8]}
}
ENTRY %main (x: f32[2,64,32], z: f32[]) -> f32[64,8] {
  %x = f32[2,64,32]{2,1,0} parameter(0)
  %z = f32[] parameter(1)
  ROOT %out = f32[64,8]{1,0} fusion(%x, %z), kind=kLoop, calls=%summed
}
"""
    # 64 x 8 float32 written, twice as many read, 4 bytes of the initial value; not the 16,384 of
    # the array.
    assert memory_traffic(parse(text), _none) == 3 * 2048 + 4


def test_an_update_of_a_column_writes_a_sector_for_each_number():
    text = """HloModule column, num_partitions=1
ENTRY %main (x: bf16[16,64], part: bf16[16,1], i: s32[]) -> bf16[16,64] {
  %x = bf16[16,64]{1,0} parameter(0)
  %part = bf16[16,1]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %out = bf16[16,64]{1,0} dynamic-update-slice(%x, %part, %i, %i)
}
"""
    # 16 numbers of 2 bytes read and written to places 128 bytes apart, 32 bytes each.
    assert memory_traffic(parse(text), _none) == 16 * 2 + 16 * 32
    # A row of 64 lies in one piece, 128 bytes.
    assert memory_traffic(parse(text.replace("bf16[16,1]", "bf16[1,64]")), _none) == 2 * 128


def test_what_a_cache_may_give_again():
    text = """HloModule again, num_partitions=1
ENTRY %main (x: f32[100], big: f32[1000]) -> f32[100] {
  %x = f32[100]{0} parameter(0)
  %big = f32[1000]{0} parameter(1)
  %a = f32[100]{0} negate(%x)
  %b = f32[10,10]{1,0} bitcast(%a)
  %c = f32[10,10]{1,0} negate(%b)
  %far = f32[1000]{0} negate(%big)
  ROOT %d = f32[10,10]{1,0} negate(%b)
}
"""
    # `a` reads and writes 400 bytes each, `c` reads them 800 bytes of traffic later. `far` moves
    # 8,000; `d` reads the 400 again 8,800 bytes after `c` did.
    assert memory_traffic(parse(text), _none) == 800 + 800 + 8000 + 800
    distances = 799, 801, 8799, 8801
    assert [read_again(parse(text), _none, within) for within in distances] == [0, 400, 400, 800]
    # At fractions f of both, from 800 to 400 bytes apart where the second reads half as fast: a
    # quarter within 500.
    slower = text.replace("f32[10,10]{1,0} negate(%b)\n  %far", "f32[0]{0} negate(%b)\n  %far")
    assert read_again(parse(slower), _none, 500) == 100


_PRODUCTS = """HloModule parts, num_partitions=1

ENTRY %main (x: f32[3,3]) -> f32[3,3] {
  %x = f32[3,3]{1,0} parameter(0)
  %a = f32[3,3]{1,0} dot(%x, %x), DIMS, metadata={op_name="jit(s)/micro_batches/jvp()/while/body/dot_general"}
  %b = f32[3,3]{1,0} dot(%a, %x), DIMS, metadata={op_name="jit(s)/transpose(jvp())/rematted_computation/dot_general"}
  %c = f32[3,3]{1,0} dot(%b, %x), DIMS, metadata={op_name="jit(s)/transpose(jvp())/checkpoint/dot_general"}
  %d = f32[3,3]{1,0} dot(%c, %x), DIMS, metadata={op_name="jit(s)/jvp(logprob_chunks)/while/body/dot_general"}
  %e = f32[3,3]{1,0} dot(%d, %x), DIMS, metadata={op_name="jit(s)/transpose(jvp(logprob_chunks))/dot_general"}
  %f = f32[3,3]{1,0} dot(%e, %x), DIMS, metadata={op_name="jit(s)/transpose(jvp(logprob_chunks))/dot_general"}
  ROOT %g = f32[3,3]{1,0} dot(%f, %x), DIMS
}
""".replace("DIMS", "lhs_contracting_dims={1}, rhs_contracting_dims={0}")


def test_products_by_what_they_are_for():
    # 2 x 3 x 3 x 3 each; two of the head's backward pass.
    assert compiled_flops(parse(_PRODUCTS), _none).parts == {
        "layers forward": 54,
        "layers again": 54,
        "layers backward": 54,
        "head forward": 54,
        "head backward": 108,
        "unnamed": 54,
    }


def test_scopes():
    assert in_scope("jit(f)/a/while/body/transpose(jvp(b))/while", "b")
    assert in_scope("jit(f)/a/while", "a") and not in_scope("jit(f)/ab/while", "a")


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="HLO text: it has no ENTRY computation"):
        parse("HloModule nothing")


def test_the_mask_of_an_attention_kernel_is_not_its_query():
    text = """HloModule packed, num_partitions=1

ENTRY %main (q: bf16[1,64,2,8], k: bf16[1,64,1,8], mask: bf16[1,1,64,64]) -> bf16[1,64,2,8] {
  %q = bf16[1,64,2,8]{3,2,1,0} parameter(0)
  %k = bf16[1,64,1,8]{3,2,1,0} parameter(1)
  %mask = bf16[1,1,64,64]{3,2,1,0} parameter(2)
  ROOT %out = bf16[1,64,2,8]{3,2,1,0} custom-call(%q, %k, %k, %mask), custom_call_target="__cudnn$fmhaScaleBiasSoftmax"
}
"""
    # Two products of 2 heads x 64 x 64 x 8, half of each; the mask has four times as many entries
    # as the queries.
    assert compiled_flops(parse(text), _none).attention == 2 * 2 * 2 * 64 * 64 * 8 / 2
