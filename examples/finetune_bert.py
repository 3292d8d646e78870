"""Train a BERT of transformers with its ``Trainer``, which knows nothing of ``fl.fuse``.

    python examples/finetune_bert.py [--steps 150]

The task is made up: of which of two words a sentence has more. The weights are random and small, so that nothing is
downloaded and a CPU is enough.
"""

import argparse
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import fusedlayers as fl

WORDS, LENGTH = 16, 31
#: The first word of each sentence, and the two that are counted.
START, ONE, OTHER = 0, 1, 2


def sentences(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Half of them with more of the one word, and half with more of the other."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(ONE, WORDS, (2 * count, LENGTH), generator=generator)
    difference = (words == ONE).sum(1) - (words == OTHER).sum(1)
    chosen = torch.cat([words[difference > 0][: count // 2], words[difference < 0][: count // 2]])
    chosen = torch.cat([torch.full((len(chosen), 1), START), chosen], 1)
    labels = torch.arange(len(chosen)) >= count // 2
    return [{"input_ids": ids, "labels": label} for ids, label in zip(chosen, labels.long(), strict=True)]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertForSequenceClassification(BertConfig(vocab_size=WORDS, **sizes))
    training, held_out = sentences(4096, seed=1), sentences(512, seed=2)

    fl.fuse(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=32, per_device_eval_batch_size=256, learning_rate=1e-3,
            use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=training, eval_dataset=held_out, compute_metrics=accuracy)
        before = trainer.evaluate()["eval_accuracy"]
        trainer.train()
        after = trainer.evaluate()["eval_accuracy"]
    print(f"accuracy: {before:.1%} before, {after:.1%} after {steps} steps")


if __name__ == "__main__":
    main()
