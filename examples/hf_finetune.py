"""Fine-tune a tiny random Llama on additions, with coupled position ids in place of RoPE.

Half a minute to a minute on one core, without a network: python examples/hf_finetune.py
Needs the extra `hf`: pip install "gossamer[hf]"
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gossamer.models import add_positions
from gossamer.tasks import AdditionTask

STEPS = 500


def build(task: AdditionTask) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=task.vocab_size, hidden_size=64, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, pad_token_id=task.pad, bos_token_id=None, eos_token_id=None,
        initializer_range=0.1,
    )  # fmt: skip
    return add_positions(LlamaForCausalLM(config), "coupled_relative", share=False)


def train(model: LlamaForCausalLM, task: AdditionTask, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.1)
    for step, batch in zip(range(1, steps + 1), task.stream(64, seed=0), strict=False):
        loss = model(batch.tokens, position_ids=batch.position_ids, labels=batch.labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step:4}  loss {loss:.4f}")


def exact_answers(model: LlamaForCausalLM, task: AdditionTask, digits: int, count: int) -> int:
    cell = task.grid(digits=[digits])[0].task
    batch = cell.sample(count, generator=torch.Generator().manual_seed(0), split="test")
    begin = int(batch.loss_mask[0].int().argmax())  # the answer's first token
    prompt, answer = batch.tokens[:, :begin], batch.tokens[:, begin:]
    new = answer.shape[1]
    ids = batch.position_ids  # of prompt and answer
    out = model.generate(prompt, position_ids=ids, max_new_tokens=new, do_sample=False)
    return int((out[:, begin:] == answer).all(1).sum())


if __name__ == "__main__":
    torch.set_num_threads(1)
    task = AdditionTask(digits=(1, 5), carry_chains=0.3)
    model = build(task)
    train(model, task, STEPS)
    model.eval()
    for digits in (5, 10, 15):
        print(f"{digits:2} digits: {exact_answers(model, task, digits, 50)} of 50 answers exact")
