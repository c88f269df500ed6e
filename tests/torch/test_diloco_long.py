"""A small transformer on real text: with DiLoCo it comes to the loss that data parallel training comes to."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torch.test_diloco import corpus
from wancoll.chaos import Cluster, in_threads

torch = pytest.importorskip("torch")
from wancoll.torch.training.diloco import DiLoCo  # noqa: E402 -- needs torch

PEERS, STEPS, BATCH, CONTEXT, WIDTH = 4, 1200, 16, 32, 48


class Transformer(torch.nn.Module):
    """Two layers that guess the next byte."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(128, WIDTH)
        self.place = torch.nn.Embedding(CONTEXT, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = torch.nn.Linear(WIDTH, 128)
        self.mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def forward(self, x: Any) -> Any:
        return self.out(self.layers(self.embed(x) + self.place.weight, mask=self.mask, is_causal=True))


TEXT = corpus(200_000).clamp(max=127)
HELD_OUT = 20_000


def loss(model: Any, starts: Any) -> Any:
    windows = torch.stack([TEXT[start : start + CONTEXT + 1] for start in starts.tolist()])
    return torch.nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def batch(shard: int, step: int) -> Any:
    draw = torch.Generator().manual_seed(step * PEERS + shard)
    return torch.randint(len(TEXT) - HELD_OUT - CONTEXT, (BATCH,), generator=draw)


def held_out(model: Any) -> float:
    with torch.no_grad():
        return float(loss(model, torch.arange(len(TEXT) - HELD_OUT, len(TEXT) - CONTEXT - 1, CONTEXT)))


def trained(steps: int, model: Any, shards: list[int], after: Any) -> None:
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warm = torch.optim.lr_scheduler.OneCycleLR(inner, 3e-3, steps, pct_start=0.1)
    for step in range(steps):
        sum(loss(model, batch(shard, step)) for shard in shards).div(len(shards)).backward()
        inner.step()
        warm.step()
        inner.zero_grad()
        after()


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_final_loss_is_that_of_data_parallel_within_two_percent() -> None:
    torch.set_num_threads(1)
    plain = Transformer()
    trained(STEPS, plain, list(range(PEERS)), lambda: None)
    goal = held_out(plain)

    with Cluster(PEERS, fork=True) as cluster:
        comms = in_threads(lambda k: cluster.connect(k, name=f"m{k}", start_world=PEERS), PEERS, 30)

        def train(k: int) -> float:
            model = Transformer()
            diloco = DiLoCo(model.parameters(), every=20, fragments=2, delay=4, mixing=0.5)
            diloco.join(comms[k])
            trained(STEPS, model, [k], lambda: diloco.step(BATCH * CONTEXT))
            with torch.no_grad():
                at = torch.cat(diloco.outer)
                for each in model.parameters():
                    each.copy_(at[: each.numel()].reshape(each.shape))
                    at = at[each.numel() :]
            return held_out(model)

        found = in_threads(train, PEERS, 3000)
        for comm in comms:
            comm.close()
    print(f"held-out loss: data parallel {goal:.4f}, DiLoCo {found}")
    assert len(set(found)) == 1
    assert found[0] < 1.02 * goal
