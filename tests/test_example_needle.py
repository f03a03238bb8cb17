# SPDX-License-Identifier: Apache-2.0
"""The needle example, run as a user runs it, at tiny sizes on the CPU; its task and its sparse model's start."""

from __future__ import annotations

import re

import pytest
import torch

from tests.tools import example_modules
from tests.tools.example_modules import drawn, printed

example = example_modules.fixture("needle")


def test_trains_and_finds_eager_and_compiled_alike(example, tmp_path, capsys):
    out = tmp_path / "picture.png"
    widths = {"dim": 32, "layers": 1, "batch": 2, "heads": 2, "head_dim": 8}
    size = example.Size(steps=12, seq=192, short=24, needles=3, longest=1024, tried=2048, warm=0, **widths)
    (dense, eager, compiled), p = example.compare(torch.device("cpu"), size, seed=1, out=out)
    for run in (dense, eager, compiled):
        assert len(run.loss) == len(run.step_s) == len(run.block) == size.steps
        assert 2.0 < run.loss[0] < 7.0
    assert not any(dense.block) and all(eager.block)
    # fp32 sums in another order, over 12 optimizer steps.
    assert max(abs(a - b) for a, b in zip(eager.loss, compiled.loss, strict=True)) < 2e-3
    assert eager.loss[0] == pytest.approx(compiled.loss[0], abs=1e-5)
    assert eager.block[-1] < eager.block[0]

    assert set(p.accuracy) == {"dense", "selected"} and set(p.accuracy["dense"]) == {512, 1024}
    assert all(len(depths) == size.needles for depths in p.accuracy["selected"].values())
    assert set(p.seconds) == set(example.needle_picture.COLORS)
    assert all(set(by_length) == {512, 1024} for by_length in p.seconds.values())
    assert len(p.blocks) == len(p.holds) == size.needles
    assert all(len(row) == 32 and sum(row) == example.TOP_K for row in p.blocks)
    drawn(out, 800, 0)
    words = ("right answers, 1K", "forward, 1K", "largest difference of the loss", "in the first 12 steps", out.name)
    printed(capsys, *words)


def test_needles_and_questions(example):
    task = example.needle_task
    text = torch.full((5000,), ord("."), dtype=torch.uint8)
    batch = task.make(text, 3, 300, 5, torch.Generator().manual_seed(0))
    for b in range(3):
        line = bytes(batch.tokens[b].tolist()).decode()
        hidden, asked = line[:-30], line[-30:]
        found = re.findall(r"<(..)=(.)>", hidden)
        assert len(found) == len({name for name, _ in found}) == 5
        assert sorted(re.findall(r"<(..)=(.)>", asked)) == sorted(found)
        for i in range(5):
            ask, where = int(batch.ask[i]), int(batch.where[b, i])
            assert line[ask] == "=" and line[ask + 1] == chr(int(batch.answer[b, i])) == line[where]
            assert line[ask - 3 : ask + 2] == line[where - 4 : where + 1]
            assert where // (len(hidden) // 5) == int(batch.depth[b, i])
    with pytest.raises(ValueError, match="at least 60 for 5"):
        task.make(text, 1, 59, 5, torch.Generator())


def test_the_sparse_model_begins_as_the_dense_one(example):
    """With fewer blocks than are selected, and only the selected branch, both models are the same function."""
    torch.manual_seed(0)
    dense = example.NeedleModel(16, 2, 8)
    sparse = example.sparse(dense, block=8, top_k=8, compress=4, window=8)
    gate = sparse.block.attention.gate
    assert not gate.weight.any()
    with torch.no_grad():
        gate.bias.copy_(torch.tensor([-100.0, 100.0, -100.0]).repeat_interleave(2))
    tokens, ask = torch.randint(256, (2, 40)), torch.tensor([7, 30, 39])
    torch.testing.assert_close(sparse(tokens, ask), dense(tokens, ask), atol=1e-5, rtol=1e-5)


def test_the_block_loss_teaches_the_selection(example):
    torch.manual_seed(0)
    model = example.sparse(example.NeedleModel(16, 2, 8), block=8, top_k=3, compress=4, window=8)
    text = torch.randint(256, (4000,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    batch = example.needle_task.make(text, 4, 200, 4, torch.Generator().manual_seed(2))
    loss = model.block_loss(batch.tokens, batch.ask, batch.where)
    loss.backward()
    layer = model.block.attention
    taught = layer.k_proj.weight.grad.view(3, 8, 16).abs().amax((1, 2))
    assert taught[0] > 0 and not taught[1:].any(), "the compressed branch's keys"
    assert layer.q_proj.weight.grad.any() and layer.compress_k.inner.weight.grad.any()
    assert 1.0 < loss.item() < 10.0


# --- attention to tokens ------------------------------------------------------------------------------------


def token_size(example, steps):
    """A small run on texts of 256 bytes."""
    widths = {"dim": 32, "layers": 1, "heads": 2, "head_dim": 16}
    return example.Size(
        steps=steps, batch=4, seq=256, short=0, needles=4, longest=512, tried=0, warm=0, **widths
    )  # fmt: skip


@pytest.fixture(scope="module")
def by_token(example):
    """A dense model that answers on short texts, and one with attention to tokens, trained as the example trains it."""
    text = example.stdlib_text.load().train
    torch.manual_seed(0)
    dense = example.NeedleModel(32, 2, 16)
    with example.Progress(disable=True) as bar:
        steps = 150
        dense = example.train(example.Run("", dense), example.short_texts(text, steps, 0), steps, bar).model
        size = token_size(example, 90)
        run = example.Run(example.TOKENS, example.by_token(dense, 16))
        example.train(run, example.long_texts(text, size, 1), size.steps, bar)
    return dense, run, text


def test_the_token_model_begins_as_the_dense_one(example):
    """With lists as long as the text, both models are the same function, whatever the index."""
    torch.manual_seed(0)
    dense = example.NeedleModel(16, 2, 8)
    model = example.by_token(dense, 40)
    tokens, ask = torch.randint(256, (2, 40)), torch.tensor([7, 30, 39])
    torch.testing.assert_close(model(tokens, ask), dense(tokens, ask), atol=1e-5, rtol=1e-5)
    model = example.by_token(dense, 6)
    torch.testing.assert_close(model.answers(tokens, ask), model(tokens, ask), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(tokens, ask), dense(tokens, ask), atol=1e-3)
    nats, _ = model.loss(tokens, ask, tokens[:, ask], ask.expand(2, 3))
    want = torch.nn.functional.cross_entropy(model(tokens, ask).flatten(0, 1), tokens[:, ask].flatten())
    assert nats.item() == pytest.approx(want.item(), abs=1e-5)


def test_each_loss_has_its_own_parameters(example):
    """The answers train everything but the index; the index's loss trains the index and nothing else."""
    torch.manual_seed(0)
    model = example.by_token(example.NeedleModel(16, 2, 8), 6)
    tokens, ask = torch.randint(256, (2, 40)), torch.tensor([7, 30, 39])
    for which in (0, 1):
        model.zero_grad()
        model.loss(tokens, ask, tokens[:, ask], ask.expand(2, 3))[which].backward()
        for name, parameter in model.named_parameters():
            trained = parameter.grad is not None and bool(parameter.grad.any())
            assert trained == (("index_" in name) == bool(which)), name


def test_the_index_warms_up_alone(example, by_token):
    """The warm-up lowers both losses of the index, over all and over chosen tokens, and changes nothing else."""
    dense, _, text = by_token
    size = token_size(example, 30)
    batch = next(example.long_texts(text, size, 5))
    run = example.Run(example.TOKENS, example.by_token(dense, 16))
    before = {name: t.clone() for name, t in run.model.state_dict().items()}

    def losses():
        with torch.no_grad():
            sparse = run.model.loss(batch.tokens, batch.ask, batch.answer, batch.where)[1]
            return run.model.warm_up_loss(batch.tokens).item(), sparse.item()

    all_before, chosen_before = losses()
    with example.Progress(disable=True) as bar:
        example.warm_up(run, example.long_texts(text, size, 6), size.steps, bar)
    all_after, chosen_after = losses()
    assert len(run.warm) == 30 and run.warm[-1] < 0.7 * run.warm[0]
    assert all_after < 0.7 * all_before and chosen_after < 0.7 * chosen_before
    for name, t in run.model.state_dict().items():
        assert torch.equal(t, before[name]) == ("index_" not in name), name


def test_the_index_learns_to_choose_the_answer(example, by_token):
    """An index that knows nothing chooses an answer as often as chance; the trained one nearly always."""
    dense, run, text = by_token
    generator = torch.Generator().manual_seed(3)
    batches = [example.needle_task.make(text, 1, 256, 4, generator) for _ in range(20)]

    def share(model):
        hits = [at in row for b in batches for at, row in zip(b.where[0], example.chosen_tokens(model, b), strict=True)]
        return sum(hits) / len(hits)

    assert share(example.by_token(dense, 16)) < 0.5
    assert share(run.model) > 0.85
    assert run.block[-1] < 0.7 * run.block[0]


def test_the_table_and_the_picture_show_the_tokens(example, by_token, tmp_path, capsys):
    _, run, text = by_token
    batch = example.needle_task.make(text, 1, 512, 4, torch.Generator().manual_seed(4))
    kinds = ("dense", "selected", "tokens")
    names = (*example.needle_picture.COLORS, example.TOKENS)
    seconds = {name: {512: 0.1, 1024: 0.2} for name in names} | {example.TOKENS: {512: 0.123}}
    picture = example.needle_picture.Picture(
        {kind: {512: [0.5] * 4, 1024: [0.25] * 4} for kind in kinds},
        seconds,
        {name: run.loss for name in (example.DENSE, example.EAGER, example.COMPILED, example.TOKENS)},
        [[True] * 16] * 4,
        [3, 4, 5, 6],
        example.BLOCK,
        example.chosen_tokens(run.model, batch),
    )
    example.needle_picture.draw(picture, tmp_path / "needle.png", "test")
    drawn(tmp_path / "needle.png", 0, 1500)
    runs = [example.Run(name, run.model, run.loss, run.block, run.step_s, [2.5, 1.5]) for name in picture.losses]
    example.console.print(example.table_of(runs, picture))
    printed(capsys, "2.500 / 2.000", f"{run.block[0]:.3f} / ", "123 ms", "forward, 1K", "tokens")
