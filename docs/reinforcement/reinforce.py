"""REINFORCE on a toy reward: octavo samples, torch trains, and after every step the new weights go to octavo in place.

A tiny Llama with random weights learns to write tokens below 16, of 64. The reward is their share, at first a quarter.
"""

import argparse
import tempfile

import torch
import transformers

from octavo import LLM, CompletionOutput, SamplingParams
from octavo.worker_proc.training import SamplerForward

NUM_REWARDED = 16
NUM_SAMPLES = 32
LENGTH = 12
PROMPT = [1, 20, 40, 60]


def new_policy() -> transformers.PreTrainedModel:
    """Return a tiny model with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def logprobs_of(policy: transformers.PreTrainedModel, sequences: torch.Tensor) -> torch.Tensor:
    """Return the logprobs of the drawn tokens, one row for each sequence, with gradients."""
    logits = policy(sequences[:, :-1]).logits[:, len(PROMPT) - 1 :].log_softmax(-1)
    return logits.gather(2, sequences[:, len(PROMPT) :, None])[..., 0]


def train(num_steps: int) -> list[float]:
    """Return the mean reward of each step."""
    policy = new_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    params = SamplingParams(n=NUM_SAMPLES, temperature=1.0, max_tokens=LENGTH, ignore_eos=True, logprobs=0)
    rewards = []
    with tempfile.TemporaryDirectory() as directory:
        policy.save_pretrained(directory)
        with LLM(directory, dtype="float32", skip_tokenizer_init=True, max_model_len=64) as llm:
            exact = SamplerForward(llm.client.facts.config)
            for step in range(num_steps):
                (output,) = llm.generate([PROMPT], params, use_tqdm=False)
                assert all(one.weight_versions == [(0, LENGTH, step)] for one in output.outputs)
                drawn = torch.tensor([one.token_ids for one in output.outputs])
                reward = (drawn < NUM_REWARDED).float().mean(1)
                rewards.append(float(reward.mean()))
                if step % 25 == 0:
                    check_bits(llm, exact, policy, output.outputs[0])
                    print(f"step {step}: reward {rewards[-1]:.2f}")
                sequences = torch.cat((torch.tensor(PROMPT).expand(NUM_SAMPLES, -1), drawn), 1)
                advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
                loss = -(advantage[:, None] * logprobs_of(policy, sequences)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                version = llm.update_weights(policy.state_dict(), label=f"step {step + 1}")
                assert version == step + 1
    print(f"reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last")
    return rewards


def check_bits(llm: LLM, exact: SamplerForward, policy: transformers.PreTrainedModel, drawn: CompletionOutput) -> None:
    """Verify that all ways to the logprobs of a sequence give the bits of sampling: its divergence is exactly 0."""
    sampled = [row[token].logprob for row, token in zip(drawn.logprobs, drawn.token_ids, strict=True)]
    assert llm.score_tokens(PROMPT, drawn.token_ids) == sampled
    exact.load(policy.state_dict().items())
    assert exact.logprobs([*PROMPT, *drawn.token_ids])[-LENGTH:].tolist() == sampled


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    train(parser.parse_args().steps)
