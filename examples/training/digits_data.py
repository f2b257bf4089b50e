"""The handwritten digits of scikit-learn for the examples of this directory."""

import torch
from sklearn.datasets import load_digits


def load(n=1500):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images[:n], torch.tensor(digits.target[:n])
