"""The demo: its arithmetic, its judgement, and the whole command."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="the extra 'demo' is not installed")

from wancoll.cli.trying import demo
from wancoll.demo import data, director, model, worker
from wancoll.demo.outcome import Outcome
from wancoll.demo.reports import Finished, Stepped
from wancoll.errors import ConfigError


@pytest.fixture(scope="module")
def digits():
    return data.digits()


# ---- the network ---------------------------------------------------------------------------------------


def test_gradient_is_that_of_finite_differences(digits):
    parameters = model.first_parameters(3).astype(np.float64)
    images, labels = digits.images[:7].astype(np.float64), digits.labels[:7]
    loss, gradient = model.loss_and_gradient(parameters, images, labels)
    random = np.random.default_rng(5)
    w1, b1, w2, b2 = (part.size for part in model.layers(parameters))
    ends = np.cumsum([0, w1, b1, w2, b2])
    step = 1e-6
    for first, end in pairwise(ends):  # some of each layer
        for i in random.integers(first, end, 12):
            moved = parameters.copy()
            moved[i] += step
            more, _ = model.loss_and_gradient(moved, images, labels)
            moved[i] -= 2 * step
            less, _ = model.loss_and_gradient(moved, images, labels)
            assert (more - less) / (2 * step) == pytest.approx(gradient[i], rel=1e-4, abs=1e-6)
    assert loss > 0
    assert np.count_nonzero(gradient) > gradient.size / 4


def test_loss_of_an_undecided_network_is_log_of_the_classes(digits):
    nothing = np.zeros(model.PARAMETERS)
    loss, _ = model.loss_and_gradient(nothing, digits.images[:10].astype(np.float64), digits.labels[:10])
    assert loss == pytest.approx(10 * np.log(10))


def test_sums_over_shards_are_those_of_the_batch_and_an_empty_shard_adds_nothing(digits):
    parameters = model.first_parameters(1).astype(np.float64)
    images, labels = digits.images.astype(np.float64), digits.labels
    whole = np.arange(50)
    loss, gradient = model.loss_and_gradient(parameters, images[whole], labels[whole])
    parts = [data.shard(whole, rank, 7) for rank in range(7)] + [whole[:0]]
    found = [model.loss_and_gradient(parameters, images[part], labels[part]) for part in parts]
    assert sum(one for one, _ in found) == pytest.approx(loss)
    np.testing.assert_allclose(sum(one for _, one in found), gradient, atol=1e-12)


def test_apply_is_sgd_with_momentum():
    replica = model.Replica(0)
    start = replica.parameters.copy()
    one = np.ones(model.PARAMETERS, np.float32)
    replica.apply(one)
    np.testing.assert_array_equal(replica.parameters, start - np.float32(model.LEARNING_RATE))
    replica.apply(one)
    np.testing.assert_allclose(replica.momentum, 1.9)
    np.testing.assert_allclose(replica.parameters, start - model.LEARNING_RATE * 2.9, rtol=1e-5, atol=1e-6)
    assert replica.step == 2


def test_digest_sees_parameters_momentum_and_step():
    replicas = [model.Replica(0) for _ in range(5)]
    replicas[1].parameters.view(np.uint32)[0] ^= 1
    replicas[2].momentum[-1] = -0.0
    replicas[3].step = 1
    replicas[4].apply(np.zeros(model.PARAMETERS, np.float32))
    assert len({replica.digest() for replica in replicas[:4]}) == 4
    assert model.Replica(0).digest() == replicas[0].digest()
    assert model.Replica(1).digest() != replicas[0].digest()


@pytest.mark.check
def test_a_single_process_learns_the_digits_and_does_so_again(digits):
    steps, last = worker.train_alone(worker.Course(digits, seed=0, steps=400))
    assert last.accuracy > 0.95
    assert steps[0].loss > 2
    assert np.mean([step.loss for step in steps[-20:]]) < 0.1
    assert worker.train_alone(worker.Course(digits, seed=0, steps=400)) == (steps, last)


# ---- the data ------------------------------------------------------------------------------------------


def test_digits_are_split(digits):
    assert digits.images.shape == (1437, 64)
    assert digits.test_images.shape == (360, 64)
    assert digits.images.dtype == np.float32
    assert (digits.images.min(), digits.images.max()) == (0, 1)
    assert set(digits.labels) == set(digits.test_labels) == set(range(10))


@pytest.mark.parametrize("world_size", [*range(1, 18), 128, 200])
def test_shards_cover_the_batch_exactly_once(world_size):
    batch = data.batch(7, 3, 1437)
    shards = [data.shard(batch, rank, world_size) for rank in range(world_size)]
    assert sorted(np.concatenate(shards)) == sorted(batch)
    assert len(set(batch)) == data.BATCH
    sizes = [len(shard) for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def test_batches_follow_from_seed_and_step():
    np.testing.assert_array_equal(data.batch(1, 2, 1437), data.batch(1, 2, 1437))
    assert list(data.batch(1, 2, 1437)) != list(data.batch(1, 3, 1437))
    assert list(data.batch(1, 2, 1437)) != list(data.batch(2, 2, 1437))


def test_missing_packages_are_named_with_the_command_that_installs_them(monkeypatch):
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None if name == "sklearn" else object())
    with pytest.raises(ConfigError, match=r"got no scikit-learn; run, in the source folder: pip install '.\[demo\]'"):
        data.check_extra()


# ---- the judgement -------------------------------------------------------------------------------------

STEPS, KILL, JOIN = 8, 4, 7


def outcome(**changed) -> Outcome:
    """A success: a, b, c, d; c is killed in step 4, e joins before step 7."""

    def contributors(step):
        return tuple(n for n in "abcde" if not (n == "c" and step >= KILL) and not (n == "e" and step < JOIN))

    def stepped(name, step):
        n = 2 if step == KILL else 1
        late = 0.002 * "abd".find(name)
        return Stepped(step, 1 / step, 96 if n == 2 else 128, 1, contributors(step), n, 10 + step / 100 + late)

    reports = {name: [stepped(name, s) for s in range(1, STEPS + 1) if name in contributors(s)] for name in "abcde"}
    good = Outcome(
        STEPS,
        reports,
        {name: Finished(len(reports[name]), 0.97, "d1") for name in "abde"},
        [Stepped(step, 1 / step, 128) for step in range(1, STEPS + 1)],
        Finished(STEPS, 0.975, "d2"),
        victim="c",
        killed_in=KILL,
        killed_at=10.03,
        newcomer="e",
    )
    for name, value in changed.items():
        setattr(good, name, value)
    return good


def test_a_success_has_no_reason_to_fail_and_the_right_figures():
    good = outcome()
    assert list(good.reasons_to_fail()) == []
    assert good.joined_in == JOIN
    assert good.most_lost_steps == 0
    assert good.missed_samples == 32
    assert good.recovery == pytest.approx(0.014)  # d is the last survivor to have its commit
    assert good.world_sizes() == "4 -> 3 -> 4"
    assert good.table().row_count == 9


def test_each_flaw_is_a_reason_to_fail():
    def broken(change):
        bad = outcome()
        change(bad)
        return " | ".join(bad.reasons_to_fail())

    def set_finished(name, *fields):
        return lambda bad: bad.finished.update({name: Finished(*fields)})

    assert "replicas differ: a d1, b d9, d d1, e d1" in broken(set_finished("b", 8, 0.97, "d9"))
    assert "d's test accuracy is 1.50 points away" in broken(set_finished("d", 8, 0.96, "d1"))
    assert broken(set_finished("d", 8, 0.965, "d1")) == ""  # exactly 1 point is allowed
    assert "b did not take each of its steps once; 1 were lost" in broken(lambda bad: bad.reports["b"].pop(2))
    assert "e did not take each of its steps once; 1 were lost" in broken(lambda bad: bad.reports["e"].pop())
    assert "b did not take each of its steps once; 0" in broken(
        lambda bad: bad.reports["b"].append(bad.reports["b"][0])
    )
    assert "not all processes have finished" in broken(lambda bad: bad.finished.pop("e"))
    assert "not all processes have finished" in broken(lambda bad: setattr(bad, "alone_finished", None))
    assert "no member was killed" in broken(lambda bad: setattr(bad, "killed_in", KILL - 1))
    assert "no member joined" in broken(lambda bad: setattr(bad, "newcomer", "f"))


# ---- the command ---------------------------------------------------------------------------------------


def run_demo(tmp_path, *arguments):
    command = [sys.executable, "-m", "wancoll", "demo", *arguments]
    return subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=120)


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_the_demo_survives_its_kill_and_ends_in_the_same_bytes_each_time(tmp_path):
    digests = set()
    for options in ([], [], ["--secure"]):
        done = run_demo(tmp_path, "--steps=200", *options)
        assert (done.returncode, done.stderr) == (0, "")
        assert ("all goes over TLS" in done.stdout) == bool(options)
        assert re.search(r"step +100: SIGKILL in mid all-reduce: peer-\d's daemon", done.stdout)
        assert re.search(r"step +100: peer-\d died; epoch 2: 3 members", done.stdout)
        assert re.search(r"step +150: peer-4 joined; epoch \d+: 4 members", done.stdout)
        assert re.search(r"attempts of that operation[ │]+[2-9] ", done.stdout)
        assert re.search(r"steps lost[ │]+none ", done.stdout)
        digests.add(re.search(r"replicas hold the same bytes[ │]+yes, 4 x (\w{16}) ", done.stdout).group(1))
    assert len(digests) == 1


def test_a_replica_with_one_wrong_bit_makes_the_demo_fail(monkeypatch, capsys):
    replica = model.Replica(3)
    before = replica.digest()
    replica.parameters.view(np.uint32)[0] ^= 1
    bad = outcome()
    bad.finished["e"] = Finished(len(bad.reports["e"]), 0.97, replica.digest())
    assert before != replica.digest()
    monkeypatch.setattr(director, "play", lambda plan, show: bad)
    monkeypatch.setattr(demo, "exit_on_sigterm", lambda: None)
    assert demo.run(steps=40) == 1
    said = capsys.readouterr()
    assert re.search(r"failed: the replicas differ: .*e \w{16}$", said.err.rstrip())
    assert re.search(r"replicas hold the same bytes[ │]+NO ", said.out)
    bad.finished["e"] = bad.finished["a"]
    assert demo.run(steps=40) == 0
