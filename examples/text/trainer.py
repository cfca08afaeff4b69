"""The classifier of `engine.py` by Hugging Face's Trainer, over stages: transformers' own is one import away.

stagewright run examples/text/trainer.py --placement 0:0.0:1 --mode sync
"""

import argparse
import random
import zlib

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, EvalPrediction, TrainingArguments

from stagewright.integrations.hf import Trainer  # from transformers import Trainer

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


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


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
    parser.add_argument("--output", default="classifier", help="folder for the trained model")
    args = parser.parse_args()

    torch.manual_seed(0)
    trainer = Trainer(
        make_model(args.width, args.depth, args.tokens, args.vocabulary, args.dropout),
        TrainingArguments(
            output_dir=args.output,
            per_device_train_batch_size=args.batch,
            num_train_epochs=args.epochs,
            learning_rate=args.lr,
            warmup_steps=0.1,
            logging_steps=10,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Reviews(args.samples, args.tokens, args.vocabulary, 1),
        eval_dataset=Reviews(args.samples // 4, args.tokens, args.vocabulary, 2),
        compute_metrics=accuracy,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
