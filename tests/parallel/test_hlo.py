"""Collectives are read off HLO text as compilers write it."""

import pytest

from attnres_jax.parallel import hlo

TEXT = """
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %c = f32[] add(%a, %b)
}

%all-reduce-scatter.3 (p: bf16[4,16,32]) -> bf16[4,8,32] {
  %p = bf16[4,16,32]{2,1,0} parameter(0)
  %all-reduce.7 = bf16[4,16,32]{2,1,0:T(8,128)(2,1)} all-reduce(%p), channel_id=9, replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %d = bf16[4,8,32]{2,1,0} dynamic-slice(%all-reduce.7, %i)
}

%wrapped (p: bf16[4,8]) -> bf16[2,8] {
  ROOT %reduce-scatter.1 = bf16[2,8]{1,0} reduce-scatter(%p), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%add
}

%fused_computation.1 (p: bf16[4,8]) -> (bf16[4,8], bf16[4,16]) {
  %all-gather.1 = bf16[4,16]{1,0:T(4,128)(2,1)} all-gather(%p), replica_groups={{0,1},{2,3}}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.1 = (bf16[4,8], bf16[4,16]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.2 (p: bf16[4,8]) -> bf16[4,16] {
  ROOT %all-gather.2 = bf16[4,16]{1,0} all-gather(%p), replica_groups={{0,1},{2,3}}, frontend_attributes={chain_id="0"}
}

%body.4 (x: f32[8]) -> f32[8] {
  %psum.1 = (f32[8]{0}, f32[], /*index=2*/s32[3]{0}) all-reduce(%x, %y, %z), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %e = f32[8] get-tuple-element(%psum.1), index=0
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %all-gather-start = (f32[8]{0}, f32[32]{0:T(128)S(1)}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}
  %all-gather-done = f32[32]{0} all-gather-done(%all-gather-start)
  %pair = ((f32[8], bf16[2]), (f32[32], bf16[8])) all-gather-start(%x, %w), replica_groups=[1,4]<=[4], dimensions={0}
  %collective-permute-start = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %collective-permute-done = f32[8]{0} collective-permute-done(%collective-permute-start)
  %all-reduce-start = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %rs = ((bf16[4,8]), bf16[2,8]) async-start(%y), calls=%wrapped
  %all-to-all.1 = pred[3]{0} all-to-all(%m), replica_groups={{0,1,2,3}}
  ROOT %fusion = bf16[4,8,32] fusion(%all-reduce-start), calls=%all-reduce-scatter.3, metadata={op_name="all-gather("}
}
"""  # noqa: E501


@pytest.mark.fast
def test_collectives_of_a_text():
  assert hlo.collectives(TEXT) == {
    # A chain of two pieces; a start; a start of two operands.
    "all-gather": (3, 4 * 16 * 2 + 32 * 4 + (32 * 4 + 8 * 2)),
    "reduce-scatter": (2, 4 * 16 * 32 * 2 + 4 * 8 * 2),
    "all-reduce": (2, (32 + 4 + 12) + 32),
    "collective-permute": (1, 32),
    "all-to-all": (1, 3),
  }
  found = hlo.find(TEXT)
  assert [(x.kind, x.group) for x in found[:3]] == [
    ("reduce-scatter", 2),
    ("reduce-scatter", 2),
    ("all-gather", 2),
  ]
  assert found[3] == hlo.Collective("all-reduce", 48, 4, "body.4")
  assert found[4].computation == "main" and found[4].group == 4


@pytest.mark.fast
def test_a_program_without_any():
  assert hlo.collectives("ENTRY %main (x: f32[8]) -> f32[8] {\n}\n") == {}
