"""The ledger against sizes computed by hand, against the profiler, and against everything that could confuse it."""

import gc
import weakref

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from memlab.measuring.device import Device
from memlab.measuring.ledger import Ledger
from memlab.measuring.observation import BACKWARD, MOMENT_OF_PHASE, PHASES, Observation
from memlab.plan import Tier
from memlab.records import Category, Phase
from memlab.techniques.offload.spill import Spill


class Quiet(TorchDispatchMode):
    """A mode of the user's that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def parameters_of(model):
    return [(Category.PARAMETERS, parameter) for parameter in model.parameters()]


def gradients_of(model):
    return [(Category.GRADIENTS, p.grad) for p in model.parameters() if p.grad is not None]


def births_of(seen: Observation, category: Category, *phases: Phase) -> list[int]:
    """Sizes of what was born for something, in these phases or in any."""
    born = [event for event in seen.raw if event[1] > 0 and seen.categories.get(event[2]) is category]
    return [size_bytes for _, size_bytes, _, moment in born if PHASES[moment] in (phases or PHASES)]


def observed_step(ledger, model, optimizer, batch, run=None) -> Observation:
    """One step as the meter drives it."""
    state = [(Category.OPTIMIZER_STATE, t) for s in optimizer.state.values() for t in s.values()]
    ledger.begin([*parameters_of(model), *gradients_of(model), *state, (Category.ACTIVATIONS, batch)])
    with ledger:
        ledger.phase = Phase.FORWARD
        loss = (run or model)(batch).sum()
        ledger.phase = Phase.OTHER
        loss.backward()
        ledger.phase = Phase.STEP
        ledger.know(gradients_of(model))
        optimizer.step()
        ledger.phase = Phase.OTHER
        ledger.know((Category.OPTIMIZER_STATE, t) for s in optimizer.state.values() for t in s.values())
    return ledger.finish()


def highest(observation, category):
    return max(point.live_bytes.get(category, 0) for point in observation.timeline())


def mlp(width=64, layers=2):
    linear = [torch.nn.Linear(width, width) for _ in range(layers)]
    return torch.nn.Sequential(*(module for layer in linear for module in (layer, torch.nn.ReLU())))


def test_parameters_gradients_and_moments_have_their_textbook_sizes():
    model = mlp()
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    ledger = Ledger()
    observed_step(ledger, model, optimizer, torch.randn(4, 64))
    observation = observed_step(ledger, model, optimizer, torch.randn(4, 64))
    step_counters = 4 * len(list(model.parameters()))
    assert observation.baseline_bytes[Category.PARAMETERS] == 4 * count
    assert highest(observation, Category.GRADIENTS) == 4 * count
    assert observation.baseline_bytes[Category.OPTIMIZER_STATE] == 8 * count + step_counters
    ledger.close()


def test_state_born_in_the_first_step_is_optimizer_state():
    model = mlp()
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    observation = observed_step(Ledger(), model, optimizer, torch.randn(4, 64))
    births = births_of(observation, Category.OPTIMIZER_STATE)
    assert sum(births) == 8 * count + 4 * len(list(model.parameters()))


def test_activations_of_an_mlp_by_hand():
    model, batch = mlp(width=64, layers=3), torch.randn(32, 64)
    observation = observed_step(Ledger(), model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
    # each ReLU saves its output, which is the next layer's input; the layers' own outputs die at once
    one_matrix = 4 * 32 * 64
    scalars = highest(observation, Category.ACTIVATIONS) % one_matrix
    assert highest(observation, Category.ACTIVATIONS) // one_matrix == 1 + 3
    assert scalars <= 8


def test_peak_and_timeline_agree_to_the_byte():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    ledger = Ledger()
    observation = observed_step(ledger, model, optimizer, torch.randn(4, 64))
    assert max(point.total_bytes for point in observation.timeline()) == observation.peak_bytes
    assert sum(Device().breakdown(observation.timeline(), None, None).values()) == observation.peak_bytes
    lived = sum(observation.baseline_bytes.values()) + sum(size_bytes for _, size_bytes, _, _ in observation.raw)
    gc.collect()
    assert lived >= ledger.live_bytes
    ledger.close()


def test_a_timeline_adds_births_and_deaths_to_what_was_there():
    raw = ((1.1, 50, 3, MOMENT_OF_PHASE[Phase.FORWARD]), (1.2, 20, 4, BACKWARD), (1.3, -50, 3, BACKWARD))
    what = {1: Category.PARAMETERS, 2: Category.GRADIENTS, 3: Category.ACTIVATIONS, 4: Category.GRADIENTS}
    points = Observation(170, {1: 100, 2: 0}, raw, what, start=1.0).timeline()
    assert [p.total_bytes for p in points] == [100, 150, 170, 120]
    assert [p.seconds for p in points] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert [p.phase for p in points] == [Phase.OTHER, Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD]
    assert points[0].live_bytes == {"parameters": 100}
    assert points[-1].live_bytes == {"parameters": 100, "activations": 0, "gradients": 20}


def test_the_profiler_sees_the_same_bytes_gained_by_a_forward():
    model, batch = mlp(width=48, layers=4), torch.randn(16, 48)
    ledger = Ledger()
    ledger.begin(parameters_of(model))
    before = ledger.live_bytes
    with torch.profiler.profile(profile_memory=True) as profiler, ledger:
        out = model(batch)
    events = profiler.profiler.kineto_results.events()
    gained = sum(event.nbytes() for event in events if event.name() == "[memory]")
    assert ledger.live_bytes - before == gained > 0
    del out
    ledger.close()


def test_checkpointing_lowers_the_peak_and_recomputes_in_backward():
    model, batch = mlp(width=32, layers=8), torch.randn(256, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def by_halves(x):
        for half in (model[:8], model[8:]):
            x = checkpoint(half, x, use_reentrant=False)
        return x

    plain = observed_step(Ledger(), model, optimizer, batch)
    optimizer.zero_grad()
    saving = observed_step(Ledger(), model, optimizer, batch, by_halves)
    # half of the eight saved matrices are recomputed when needed; the cut and the gradient in flight stay
    assert plain.peak_bytes - saving.peak_bytes >= 2 * (4 * 256 * 32)
    assert len(births_of(saving, Category.ACTIVATIONS, Phase.BACKWARD)) >= 6
    assert births_of(plain, Category.ACTIVATIONS, Phase.BACKWARD) == []


def test_forward_and_backward_inside_one_function_keep_their_categories():
    model, batch = mlp(width=32, layers=4), torch.randn(64, 32)

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, anchor, rows):
            for micro in rows.chunk(4):
                with torch.enable_grad():
                    model(micro).sum().backward()
            return anchor.detach().clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient, None

    def run(rows):
        return Fused.apply(torch.zeros((), requires_grad=True), rows)

    fused = observed_step(Ledger(), model, torch.optim.SGD(model.parameters(), lr=0.1), batch, run)
    one_micro = 4 * 16 * 32
    inputs = 4 * 64 * 32
    assert 4 * one_micro <= highest(fused, Category.ACTIVATIONS) - inputs < 5 * one_micro
    assert highest(fused, Category.GRADIENTS) == sum(4 * p.numel() for p in model.parameters())


def test_of_a_gpu_sums_of_gradients_are_booked_as_in_place():
    observed = []
    for in_place in (False, True):
        ledger = Ledger("cpu")
        ledger._sums_in_place = in_place
        weight = torch.zeros(1024, requires_grad=True)
        ledger.begin([(Category.PARAMETERS, weight)])
        with ledger:
            ((weight * 2).sum() + (weight * 3).sum() + (weight * 4).sum()).backward()
        observed.append(ledger.finish())
        assert sum(size_bytes for _, size_bytes, _, _ in observed[-1].raw) == 4096  # the gradient
        ledger.close()
    assert observed[0].sums_bytes == 0
    assert observed[0].peak_bytes == observed[1].peak_bytes
    highest = [max(point.total_bytes for point in each.timeline()) for each in observed]
    assert highest == [each.peak_bytes - each.sums_bytes for each in observed]
    assert highest[0] - highest[1] == 4096


def test_tied_weights_and_views_count_once():
    embedding, head = torch.nn.Embedding(100, 8), torch.nn.Linear(8, 100, bias=False)
    head.weight = embedding.weight
    ledger = Ledger()
    ledger.begin([*parameters_of(embedding), *parameters_of(head), (Category.PARAMETERS, head.weight.view(-1)[5:])])
    assert ledger.live_bytes == 4 * 100 * 8
    with ledger:
        _views = [head.weight.t(), head.weight.view(-1), head.weight.detach().mul_(1.0)]
    assert ledger.live_bytes == 4 * 100 * 8
    ledger.close()


def test_freed_memory_returns_to_the_baseline():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ledger = Ledger()
    ledger.begin(parameters_of(model))
    before = ledger.live_bytes
    with ledger:
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    assert ledger.live_bytes == before
    ledger.close()


def test_a_view_keeps_its_storage_alive():
    ledger = Ledger()
    ledger.begin([])
    with ledger:
        view = torch.zeros(100)[:1]
    assert ledger.live_bytes == 400
    del view
    assert ledger.live_bytes == 0


def test_every_way_to_make_a_tensor_counts():
    ledger = Ledger()
    ledger.begin([])
    with ledger:
        literal = torch.tensor([1.0, 2.0])
        assert ledger.live_bytes == 8
        halves = torch.native_dropout(torch.ones(10), 0.5, True)
        assert ledger.live_bytes == 8 + 40 + 10
        many = torch._foreach_mul([literal, literal], 2.0)
        assert ledger.live_bytes == 8 + 50 + 16
        out = torch.empty(0)
        torch.add(literal, literal, out=out)
        assert ledger.live_bytes == 8 + 50 + 16 + 8
        out.resize_(100)
        assert ledger.live_bytes == 8 + 50 + 16 + 400
    del literal, halves, many, out
    assert ledger.live_bytes == 0


def test_meta_empty_and_spilled_tensors_do_not_count():
    spill = Spill(Tier.DISK)
    ledger = Ledger()
    ledger.begin([])
    with ledger:
        kept = [torch.empty(10, device="meta"), torch.empty(0), spill.store(torch.ones(1000))]
        ledger.know([(Category.OPTIMIZER_STATE, kept[2])])
    assert ledger.live_bytes == 0


def test_wrapper_subclasses_count_what_they_hold():
    ledger = Ledger()
    held = TwoTensor(torch.ones(10), torch.ones(10))
    ledger.begin([(Category.PARAMETERS, held)])
    assert ledger.live_bytes == 80
    with ledger:
        doubled = held * 2
    assert ledger.live_bytes == 160
    del doubled
    assert ledger.live_bytes == 80
    ledger.close()


@pytest.mark.parametrize("as_of_a_gpu", [False, True])
def test_sums_of_sparse_gradients_are_no_failure(as_of_a_gpu):
    embedding, rows = torch.nn.Embedding(100, 8, sparse=True), torch.tensor([1, 2, 3])
    ledger = Ledger()
    ledger._sums_in_place = as_of_a_gpu
    ledger.begin(parameters_of(embedding))
    with ledger:
        (embedding(rows).sum() + embedding(rows + 1).sum()).backward()
    assert ledger.finish().sums_bytes == 0
    ledger.close()


def test_sparse_gradients_count_their_indices_and_values():
    embedding = torch.nn.Embedding(100, 8, sparse=True)
    ledger = Ledger()
    ledger.begin(parameters_of(embedding))
    with ledger:
        embedding(torch.tensor([1, 2, 3])).sum().backward()
        ledger.know(gradients_of(embedding))
    assert sum(births_of(ledger.finish(), Category.GRADIENTS)) == 24 + 96
    ledger.close()


def test_what_an_observed_step_leaves_alive_is_in_the_next_baseline():
    ledger = Ledger()
    ledger.begin([])
    with ledger:
        ledger.phase = Phase.FORWARD
        logits = torch.zeros(1000)
    ledger.begin([])
    assert ledger.finish().baseline_bytes == {Category.ACTIVATIONS: 4000}
    assert ledger.peak_bytes == logits.numel() * 4
    ledger.close()


def refused(run) -> torch.OutOfMemoryError:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run()
    return caught.value


def test_a_birth_past_the_capacity_is_refused_and_not_counted():
    ledger = Ledger(capacity_bytes=2**20)
    ledger.begin([])
    with ledger:
        kept = torch.zeros(1000)
        error = refused(lambda: torch.zeros(2**20))
        assert ledger.live_bytes == 4000
        assert ledger.peak_bytes == 4000
        again = torch.zeros(1000)
    assert str(error) == (
        "memlab CPU device out of memory. Tried to allocate 4.0 MiB. Capacity 1.0 MiB, of which 1020.1 KiB is free. "
        "3.9 KiB is held by 1 live storages."
    )
    assert [size_bytes for _, size_bytes, _, _ in ledger.finish().raw] == [4000, 4000]
    del kept, again
    ledger.close()


def test_the_refused_tensor_dies_although_the_traceback_lives():
    born = []

    class Watch(Quiet):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            born.append(weakref.ref(out.untyped_storage()))
            return out

    ledger = Ledger(capacity_bytes=1000)
    ledger.begin([])
    # the ledger lies beneath every mode, so what it returns passes through `Watch`, but what it refuses does not
    with Watch(), ledger:
        error = refused(lambda: torch.zeros(1000))
    assert error.__traceback__ is not None
    assert not born
    assert ledger.live_bytes == 0


def test_a_users_mode_may_end_while_the_ledger_watches():
    ledger, mode = Ledger(), Quiet()
    ledger.begin([])
    with mode:
        ledger.start()
        one = torch.zeros(10)
    assert _get_current_dispatch_mode_stack() == [ledger]
    with Quiet():
        two = torch.zeros(10)
        ledger.stop()
        three = torch.zeros(10)
    assert _get_current_dispatch_mode_stack() == []
    assert ledger.live_bytes == 4 * (one.numel() + two.numel()) < 4 * (one.numel() + two.numel() + three.numel())
    ledger.close()


def test_starting_and_stopping_twice_is_once():
    ledger = Ledger()
    ledger.start()
    ledger.start()
    assert _get_current_dispatch_mode_stack() == [ledger]
    ledger.stop()
    ledger.stop()
    assert _get_current_dispatch_mode_stack() == []


def test_two_ledgers_see_the_same():
    one, two = Ledger(), Ledger()
    with one, two:
        kept = torch.zeros(10)
    assert one.live_bytes == two.live_bytes == 4 * kept.numel()


def test_a_closed_ledger_forgets_everything():
    ledger = Ledger()
    ledger.begin([])
    with ledger:
        kept = torch.zeros(10)
    ledger.close()
    del kept
    assert ledger.live_bytes == 0
    assert ledger.finish().raw == ()
