import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from slime_core.algorithms.log_probs import chunked_log_probs, log_probs_and_entropy
from slime_core.errors import ConfigError
from slime_core.megatron.settings import TrainerSettings

TOKENS, VOCAB, HIDDEN = 11, 37, 8


def plain(logits, targets, temperature):
    log_p = F.log_softmax(logits.double() / temperature, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


def random_case(seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, VOCAB, generator=generator, dtype=torch.float64) * scale
    return logits, torch.randint(0, VOCAB, (TOKENS,), generator=generator)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_values_and_gradients_equal_the_plain_formula(temperature):
    logits, targets = random_case()
    g = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    grads = []
    for function in (plain, log_probs_and_entropy):
        leaf = logits.clone().requires_grad_()
        log_probs, entropy = function(leaf, targets, temperature)
        (g * log_probs + (g**2 - 0.5) * entropy).sum().backward()
        grads.append((log_probs, entropy, leaf.grad))
    for ours, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    logits, targets = random_case(1)
    leaf = logits[:3].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: log_probs_and_entropy(x, targets[:3], 0.8), (leaf,))


def test_temperature_is_that_of_the_sampling_distribution():
    logits, targets = random_case(2)
    warm, _ = log_probs_and_entropy(logits, targets, 2.0)
    halved, _ = log_probs_and_entropy(logits / 2, targets, 1.0)
    torch.testing.assert_close(warm, halved)
    with pytest.raises(ConfigError, match="above 0"):
        log_probs_and_entropy(logits, targets, 0.0)


def test_low_precision_logits_are_worked_on_in_float32():
    logits, targets = random_case(3)
    low = logits.bfloat16().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(low, targets)
    assert log_probs.dtype == entropy.dtype == torch.float32
    expected, _ = plain(low.detach(), targets, 1.0)
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-5, atol=1e-5)
    log_probs.sum().backward()
    assert low.grad is not None and low.grad.dtype == torch.bfloat16


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, float("-inf")]], requires_grad=True)
    log_probs, entropy = log_probs_and_entropy(logits, torch.tensor([0, 1]))
    (log_probs + entropy).sum().backward()
    assert entropy.tolist() == pytest.approx([0.0, 0.6931472])
    assert torch.isfinite(log_probs).all() and torch.isfinite(logits.grad).all()


def test_the_inputs_are_left_alone():
    logits, targets = random_case(4)
    before = logits.clone()
    leaf = logits.requires_grad_()
    log_probs, entropy = log_probs_and_entropy(leaf, targets, 0.7)
    (log_probs + entropy).sum().backward()
    assert torch.equal(logits.detach(), before)


def test_a_recorded_nucleus_renormalises_and_always_holds_the_target():
    logits, targets = random_case(5)
    keep = torch.zeros(TOKENS, VOCAB, dtype=torch.bool)
    keep[:, :4] = True
    leaf = logits.clone().requires_grad_()
    log_probs, entropy = log_probs_and_entropy(leaf, targets, 1.0, keep)
    for i in range(TOKENS):
        inside = sorted({*range(4), int(targets[i])})
        expected = logits[i, targets[i]] - torch.logsumexp(logits[i, inside], 0)
        assert log_probs[i].item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(entropy, plain(logits, targets, 1.0)[1])
    log_probs.sum().backward()
    assert torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize("chunk_tokens", [1, 4, 11, 100])
def test_chunks_change_neither_values_nor_gradients(chunk_tokens):
    _, targets = random_case(6)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    results = []
    for chunked in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        if chunked:
            out = chunked_log_probs(lambda x, w=w: x @ w.T, h, targets, 0.9, chunk_tokens)
        else:
            out = plain(h @ w.T, targets, 0.9)
        (out[0] * 2 + out[1]).sum().backward()
        results.append((*out, h.grad, w.grad))
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


class PeakBytes(TorchDispatchMode):
    """Adds up the storages that are alive at once."""

    def __init__(self):
        super().__init__()
        self.alive, self.now, self.peak = set(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.watch(tensor.untyped_storage())
        return out

    def watch(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.alive:
            self.alive.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, key, size)

    def forget(self, key, size):
        self.alive.discard(key)
        self.now -= size


def test_memory_is_that_of_one_chunk_of_logits_whatever_the_number_of_tokens():
    vocab, chunk = 4096, 16
    weight = torch.randn(vocab, HIDDEN, requires_grad=True)
    peaks = {}
    for tokens in (64, 256):
        hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
        targets = torch.randint(0, vocab, (tokens,))
        weight.grad = None
        with PeakBytes() as meter:
            log_probs, entropy = chunked_log_probs(
                lambda h: h @ weight.T, hidden, targets, chunk_tokens=chunk
            )
            (log_probs.sum() + entropy.sum()).backward()
        peaks[tokens] = meter.peak
    one_chunk = chunk * vocab * 4
    small = 3 * vocab * HIDDEN * 4 + 256 * (HIDDEN + 8) * 4 * 4
    assert max(peaks.values()) < 5 * one_chunk + small
    assert peaks[256] - peaks[64] < one_chunk / 2


def test_the_head_of_a_large_model_stays_below_three_gigabytes():
    """16,384 tokens, 152,064 words, hidden size 1,024, all cut by 16: bytes shrink by 256."""
    cut, full_vocab = 16, 152_064
    chunk = TrainerSettings(hf_checkpoint="x").logits_chunk(full_vocab)
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(full_vocab // cut, 1024 // cut, dtype=dtype, requires_grad=True)
        weight.grad = torch.zeros_like(weight)  # the step without a head has it, too
        hidden = torch.randn(16_384 // cut, 1024 // cut, dtype=dtype, requires_grad=True)
        targets = torch.randint(0, full_vocab // cut, (len(hidden),))
        with PeakBytes() as meter:
            meter.watch(weight.untyped_storage())
            log_probs, entropy = chunked_log_probs(
                lambda h, w=weight: h @ w.T, hidden, targets, chunk_tokens=chunk // cut
            )
            (log_probs.sum() + entropy.sum()).backward()
        added = meter.peak - weight.untyped_storage().nbytes()
        assert added * cut * cut < 3e9


def test_no_tokens_is_an_empty_result_with_a_gradient_path():
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    hidden, targets = torch.zeros(0, HIDDEN), torch.zeros(0, dtype=torch.long)
    log_probs, entropy = chunked_log_probs(lambda x: x @ weight.T, hidden, targets)
    assert len(log_probs) == len(entropy) == 0
    log_probs.sum().backward()
    assert weight.grad is not None and not weight.grad.any()
    with pytest.raises(ConfigError, match="at least 1 token"):
        chunked_log_probs(lambda x: x, hidden, targets, chunk_tokens=0)
