"""The task of the examples of this directory: the handwritten digits of scikit-learn, always in the same order."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


def dataset():
    digits = load_digits()
    images = torch.tensor(digits.data[:256], dtype=torch.float32) / 16
    return TensorDataset(images, torch.tensor(digits.target[:256], dtype=torch.int64))


def batches():
    return DataLoader(dataset(), batch_size=32)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
