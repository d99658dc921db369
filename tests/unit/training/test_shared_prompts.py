"""Responses that share a prompt get the same results and gradients as with separate prompts."""

import pytest
import torch
import torch.distributed as dist
from ranks import free_port
from tiny import FAMILIES, WINDOW, load_packed, save_family
from torch.nn.attention import varlen

from verl.algorithms.objective import sft
from verl.data.flat_batch import FlatBatch
from verl.errors import EngineError
from verl.training.fsdp.engine import FsdpEngine
from verl.training.fsdp.settings import FsdpSettings
from verl.training.fsdp.shared_prompts import find_shared_prompts
from verl.training.kernels import attention
from verl.training.kernels.attention import Packing, packed_attention, packing_kwargs
from verl.training.process_group import init_process_group
from verl.training.settings import LoraSettings

pytestmark = [pytest.mark.unit, pytest.mark.timeout(120)]

P, Q = [11, 12, 13], [11, 12, 20, 21, 22, 23, 24, 25, 26, 27]  # two prompts that begin alike, one beyond the window
SEQUENCES = [(P, [1]), (Q, [2, 3]), (P, [4, 5, 6]), ([30], [7, 8]), (Q, [9, 10]), (P, [1, 2, 3]), (Q, list(range(9)))]


def make_batch(sequences=SEQUENCES, **fields):
    tokens = [token for prompt, response in sequences for token in (*prompt, *response)]
    mask = [bit for prompt, response in sequences for bit in (*[False] * len(prompt), *[True] * len(response))]
    lengths = torch.tensor([0, *(len(prompt) + len(response) for prompt, response in sequences)])
    return FlatBatch(torch.tensor(tokens), lengths.cumsum(0), torch.tensor(mask), **fields)


def test_a_prompt_is_computed_once_and_every_token_knows_its_row():
    batch = make_batch()
    shared = find_shared_prompts(batch)
    expected = [*P, 1, 4, 5, 6, 1, 2, 3, *Q, 2, 3, 9, 10, *range(9), 30, 7, 8]
    assert batch.tokens[shared.computed].tolist() == expected
    assert torch.equal(batch.tokens[shared.computed][shared.rows], batch.tokens)
    assert torch.equal(batch.positions[shared.computed][shared.rows], batch.positions)
    assert shared.counts.sum() == batch.num_tokens
    assert shared.counts[:3].tolist() == [3, 3, 3]


def test_the_tokens_of_a_chat_template_and_eight_short_responses():
    sequences = [(list(range(46)), [k] * 18) for k in range(8)]
    batch = make_batch(sequences)
    assert (batch.num_tokens, len(find_shared_prompts(batch).computed)) == (512, 190)


def test_equal_lengths_of_a_group_are_one_run_and_see_their_own_prompt():
    kwargs = find_shared_prompts(make_batch()).attention_kwargs()
    assert kwargs["runs"] == ((1, 3), (1, 1), (2, 3), (1, 10), (2, 2), (1, 9), (1, 3))
    assert kwargs["prefixes"] == (None, (0, 3), (0, 3), None, (10, 20), (10, 20), None)
    assert kwargs["cu_seq_lens_q"].tolist() == [0, 3, 4, 7, 10, 20, 22, 24, 33, 36]
    assert kwargs["cu_seq_lens_k"].tolist() == [0, 3, 7, 13, 19, 29, 41, 53, 72, 75]
    assert kwargs["key_rows"][:13].tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 4, 5, 6]
    assert (kwargs["max_length_q"], kwargs["max_length_k"]) == (10, 19)


def test_without_a_shared_prompt_the_layout_is_the_plain_one():
    assert find_shared_prompts(make_batch([(P, [1]), (Q, [2]), ([30], [3])])) is None
    assert find_shared_prompts(make_batch([([1], []), ([1], [])])) is None, "no token of its own would be left"
    assert find_shared_prompts(FlatBatch.empty()) is None


def test_a_response_without_its_first_tokens_or_without_all_still_shares_the_prompt():
    batch = make_batch([(P, [1, 2]), (P, [4, 5, 6]), (P, [7, 8])])
    mask = batch.mask.clone()
    mask[8] = False  # the first token of the second response
    mask[-2:] = False
    shared = find_shared_prompts(batch.with_(mask=mask))
    assert len(shared.computed) == 3 + 2 + 3 + 2
    twice = find_shared_prompts(make_batch([(P, []), (P, [])]))
    assert len(twice.computed) == 2 + 1 + 1, "sequences without generated tokens"


def test_other_experts_for_the_same_prompt_are_not_shared():
    experts = torch.zeros(18, 2, 2, dtype=torch.int16)
    experts[6:8] = 1
    batch = make_batch([(P, [1]), (P, [2, 3]), (P, [4]), (P, [5])], routed_experts=experts[:17])
    assert len(find_shared_prompts(batch).computed) == 17 - 2 * 3


HEADS, KV_HEADS, DIM = 4, 2, 8


def states(total, dtype=torch.float64):
    torch.manual_seed(0)
    made = [torch.randn(1, total, heads, DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [tensor.transpose(1, 2).requires_grad_() for tensor in made]


def attend_both(compact, batch, shared, **options):
    """Return the attention of all tokens, with shared prompts and with every prompt laid out: [1, T, A, D] each."""
    ours, _ = packed_attention(torch.nn.Module(), *compact, None, **options, packing=Packing(shared.attention_kwargs()))
    whole = [tensor[:, :, shared.rows] for tensor in compact]
    plain, _ = packed_attention(
        torch.nn.Module(), *whole, None, **options, packing=Packing(packing_kwargs(batch.lengths.tolist(), "cpu"))
    )
    return ours[:, shared.rows], plain


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_to_shared_prompts_equals_that_of_whole_sequences_forward_and_backward(window, softcap):
    batch = make_batch()
    shared = find_shared_prompts(batch)
    compact = states(len(shared.computed))
    ours, plain = attend_both(compact, batch, shared, scaling=0.3, sliding_window=window, softcap=softcap)
    torch.testing.assert_close(ours, plain)
    weight = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad((weight * ours).sum(), compact), torch.autograd.grad((weight * plain).sum(), compact)
    )


@pytest.mark.parametrize("window", [None, 5])
def test_the_variable_length_kernel_gets_the_keys_of_each_response(monkeypatch, window):
    """The kernel itself needs a GPU: this is its definition instead."""

    def attend(query, key, value, ends_q, ends_k, max_q, max_k, *, scale, window_size, enable_gqa):
        out = torch.empty_like(query)
        assert (max_q, max_k) == (int(ends_q.diff().max()), int(ends_k.diff().max()))
        for start, stop, first, last in zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in (query[start:stop], key[first:last], value[first:last]))
            i = torch.arange(last - first - (stop - start), last - first)[:, None]  # aligned at the end
            j = torch.arange(last - first)
            seen = (j <= i + window_size[1]) & ((window_size[0] < 0) | (j >= i - window_size[0]))
            made = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa)
            out[start:stop] = made[0].transpose(0, 1)
        return out

    monkeypatch.setattr(varlen, "varlen_attn", attend)
    batch = make_batch()
    shared = find_shared_prompts(batch)
    compact = [tensor.detach() for tensor in states(len(shared.computed), torch.bfloat16)]
    expected, _ = attend_both(compact, batch, shared, sliding_window=window)
    monkeypatch.setitem(attention._KERNELS, "cpu", attention._attend_varlen)
    ours, _ = attend_both(compact, batch, shared, sliding_window=window)
    torch.testing.assert_close(ours, expected, atol=2e-2, rtol=2e-2)


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    return save_family(request.param, tmp_path_factory.mktemp("family"))


def run(model, batch, shared):
    """Return log-probs and entropies, and the gradients of a sum of them."""
    output = model(batch.tokens, batch.positions, batch.mask, batch.lengths.tolist(), 0.9, shared)
    torch.manual_seed(1)
    (torch.randn(batch.num_tokens) * output.logprobs + 0.1 * output.entropy).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return output, gradients


def test_every_family_has_the_log_probs_and_gradients_of_whole_sequences(path):
    model = load_packed(path, dtype=torch.float32, shared_prompts=True).train()
    long = [(list(range(WINDOW + 3)), [k] * (WINDOW * k // 2 + 2)) for k in range(3)]  # beyond the window, too
    batch = make_batch([*SEQUENCES, *long])
    (expected, right), (output, gradients) = (run(model, batch, each) for each in (None, find_shared_prompts(batch)))
    for values, others in zip(output[:2], expected[:2], strict=True):
        torch.testing.assert_close(values, others, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        scale = float(right[name].abs().max())
        assert scale > 0, name
        torch.testing.assert_close(gradient / scale, right[name] / scale, atol=1e-5, rtol=0)


def test_loading_refuses_a_model_whose_results_change(tmp_path, monkeypatch):
    path = save_family("Qwen2", tmp_path)
    monkeypatch.setattr(attention, "_prepend", lambda prefix, states: torch.cat([states[:, :, :0], states], dim=2))
    load_packed(path, dtype=torch.float32)
    message = r"log-probs of packed sequences that share a prompt differ .*use_prefix_grouper=False"
    with pytest.raises(EngineError, match=message):
        load_packed(path, dtype=torch.float32, shared_prompts=True)
    with pytest.raises(EngineError, match="hidden states of packed sequences that share a prompt differ"):
        load_packed(path, dtype=torch.float32, head="value", shared_prompts=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    init_process_group(0, 1, "127.0.0.1", free_port())
    folder = tmp_path_factory.mktemp("models")
    save_family("Qwen2", folder / "dense")
    save_family("Qwen3-MoE", folder / "moe")
    yield folder
    dist.destroy_process_group()


class Recorder(FsdpEngine):
    def _step(self, lr, *, has_tokens):
        self.gradient = torch.cat([p.grad.full_tensor().flatten() for p in self.model.parameters() if p.requires_grad])
        self.optimizer.zero_grad(set_to_none=True)
        return 1.0, False


def count_tokens(engine):
    """Return a list that the number of computed tokens of each pass is added to."""
    counts = []
    embeddings = engine.model.backbone.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, args, output: counts.append(args[0].numel()))
    return counts


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"lora": True}], ids=str)
def test_an_engine_updates_alike_and_computes_fewer_tokens(folder, options):
    if "lora" in options:
        options = {"lora": LoraSettings(4, 8, "all-linear", 0)}
    engines = [Recorder(FsdpSettings(str(folder / "dense"), shared_prompts=on, **options)) for on in (False, True)]
    plain, sharing = engines
    counts = [count_tokens(engine) for engine in engines]
    batch = make_batch()
    assert plain.update([batch], sft) == pytest.approx(sharing.update([batch], sft), rel=1e-5)
    assert float((sharing.gradient - plain.gradient).norm() / plain.gradient.norm()) < 1e-5
    [expected], [output] = plain.forward([batch]), sharing.forward([batch])
    torch.testing.assert_close(output.logprobs, expected.logprobs)
    assert counts[0][0] == batch.num_tokens == 62
    assert counts[1][0] == counts[1][-1] == 36


def test_a_critic_and_the_last_layer_of_a_reference_share_prompts(folder):
    batch = make_batch()
    values, layers = [], []
    for on in (False, True):
        torch.manual_seed(0)
        critic = FsdpEngine(FsdpSettings(str(folder / "dense"), head="value", shared_prompts=on))
        with torch.no_grad():
            critic.model.hf.score.weight.fill_(0.1)
        values.append(critic.forward([batch])[0].values)
        reference = FsdpEngine(FsdpSettings(str(folder / "dense"), trainable=False, shared_prompts=on))
        layers.append(reference.last_layer(batch).hidden)
    assert float(values[0].abs().max()) > 0
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(layers[1], layers[0])


@pytest.mark.parametrize("settings", [{"router_replay": True}, {"router_aux_loss_coef": 0.5}], ids=str)
def test_routers_replay_and_balance_as_with_whole_sequences(folder, settings):
    path, batch = str(folder / "moe"), make_batch()
    plain, sharing = (Recorder(FsdpSettings(path, shared_prompts=on, **settings)) for on in (False, True))
    [own], [recorded] = plain.forward([batch]), sharing.forward([batch])
    assert torch.equal(recorded.routed_experts, own.routed_experts)
    generator = torch.Generator().manual_seed(0)
    shared = find_shared_prompts(batch)
    others = torch.rand(len(shared.computed), 2, 4, generator=generator).argsort(-1)[..., :2].to(torch.int16)
    batch = batch.with_(routed_experts=others[shared.rows])
    counts = count_tokens(sharing)
    assert sharing.update([batch], sft) == pytest.approx(plain.update([batch], sft), rel=1e-5)
    assert counts == [36]
    assert float((sharing.gradient - plain.gradient).norm() / plain.gradient.norm()) < 1e-5
