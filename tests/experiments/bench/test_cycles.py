"""Tests of the time of a TPU program by the compiler's account."""

from experiments.bench import cycles

# A loop of 8 steps with a product of 100 cycles and a conditional of 30 or 5 in each, after 7.
TEXT = """
HloModule m

%repair (p.0: f32[4]) -> f32[4] {
  %p.0 = f32[4] parameter(0)
  ROOT %slow = f32[4] fusion(%p.0), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"30"}
}

%none (p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4] parameter(0)
  ROOT %fast = f32[4] fusion(%p.1), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"5"}
}

%body (t.0: (s32[], f32[4])) -> (s32[], f32[4]) {
  %t.0 = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%t.0), index=0
  %x = f32[4] get-tuple-element(%t.0), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %dot = f32[4] fusion(%x), kind=kOutput, calls=%f, metadata={op_name="jit(f)/while/dot_general"}, backend_config={"estimated_cycles":"100"}
  %zero = s32[] constant(0)
  %either = f32[4] conditional(%zero, %dot, %dot), branch_computations={%repair, %none}
  ROOT %out = (s32[], f32[4]) tuple(%next, %either)
}

%condition (t.1: (s32[], f32[4])) -> pred[] {
  %t.1 = (s32[], f32[4]) parameter(0)
  %j = s32[] get-tuple-element(%t.1), index=0
  %eight = s32[] constant(8)
  ROOT %less = pred[] compare(%j, %eight), direction=LT
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  %start = s32[] constant(0)
  %first = f32[4] fusion(%a), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"7"}
  %tuple = (s32[], f32[4]) tuple(%start, %first)
  %loop = (s32[], f32[4]) while(%tuple), condition=%condition, body=%body
  ROOT %result = f32[4] get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_loops_are_multiplied_out_and_a_conditional_counts_as_its_cheaper_branch():
  found = cycles.estimate(TEXT)
  assert found.cycles == 7 + 8 * (100 + 5)
  assert found.unknown == 0
  assert found.parts[0] == cycles.InstructionCost("dot (dot_general)", "f32[4]", 8, 800)
