"""Trains a Hugging Face classifier of short reviews, with the loss that the model itself computes.

The model is small, new and untrained, so that nothing is downloaded; `from_pretrained` and a tokenizer go in the same
places.
"""

import argparse
import random
import zlib
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification

import stagewright

PADDING, FIRST = 0, 2  # tokens: of nothing, and of the first word
OPINIONS = (("dull", "awful", "boring", "weak"), ("fine", "great", "lovely", "strong"))
THINGS = ("plot", "film", "score", "ending", "cast", "book", "scene", "dialogue")


class Reviews(Dataset[dict[str, Tensor]]):
    """Made-up reviews, each with one opinion among other words, as token numbers by a hash of each word."""

    def __init__(self, samples: int, tokens: int, vocabulary: int, seed: int) -> None:
        self.samples, self.tokens, self.vocabulary, self.seed = samples, tokens, vocabulary, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw, label = random.Random(self.seed * self.samples + index), index % 2
        words = draw.choices(THINGS, k=draw.randint(2, self.tokens - 1)) + [draw.choice(OPINIONS[label])]
        draw.shuffle(words)
        numbers = [FIRST + zlib.crc32(word.encode()) % (self.vocabulary - FIRST) for word in words]
        padded = torch.tensor(numbers + [PADDING] * (self.tokens - len(numbers)))
        return {"input_ids": padded, "attention_mask": (padded != PADDING).long(), "labels": torch.tensor(label)}


def make_model(width: int, depth: int, tokens: int, vocabulary: int, dropout: float) -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=4,
            intermediate_size=4 * width,
            max_position_embeddings=tokens,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=2,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=32, help="of the longest review")
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--target", type=float, default=0.98, help="stop at this accuracy")
    parser.add_argument("--weights", default="classifier.safetensors", help="file for the trained weights")
    parser.add_argument("--plan", help="a plan file, or auto: the fastest plan for this machine")
    args = parser.parse_args()

    torch.manual_seed(0)
    train_set = Reviews(args.samples, args.tokens, args.vocabulary, 1)
    val_set = Reviews(args.samples // 4, args.tokens, args.vocabulary, 2)
    model = make_model(args.width, args.depth, args.tokens, args.vocabulary, args.dropout)
    adamw = partial(torch.optim.AdamW, lr=args.lr)
    engine = stagewright.Engine(model, loss="model", optimizer=adamw, clip=1.0, plan=args.plan)
    for epoch in range(args.epochs):
        for step in engine.epoch(train_set, args.batch):
            if engine.is_main and step.batch % 10 == 0:
                print(f"step {step.batch}: loss {step.loss:.3f}")
        accuracy = engine.evaluate(val_set, "accuracy").metrics["accuracy"]
        if engine.is_main:
            print(f"epoch {epoch}: accuracy {accuracy:.1%}")
        if accuracy >= args.target:  # every rank sees the same number, so all stop here
            break
    engine.save(args.weights)


if __name__ == "__main__":
    main()
