"""The quick start of the first ikkuna's README, word for word, with smaller layers, data, and a loop."""

import sys

import torch
from sklearn.datasets import load_digits


class FullyConnectedModel(torch.nn.Module):

    def __init__(self, input_shape, num_classes=1000):
        super(FullyConnectedModel, self).__init__()

        # if channel dim not present, add 1
        if len(input_shape) == 2:
            input_shape = list(input_shape) + [1]
        H, W, C = input_shape

        self.features = torch.nn.Sequential(
            torch.nn.Linear(H * W * C, 40),
            torch.nn.ReLU(inplace=False),
            torch.nn.Linear(40, 40),
            torch.nn.ReLU(inplace=False),
            torch.nn.Linear(40, 40),
            torch.nn.ReLU(inplace=False)
        )
        self.classifier = torch.nn.Sequential(
            torch.nn.Linear(40, 20),
            torch.nn.ReLU(inplace=False),
            torch.nn.Linear(20, num_classes),
        )

    def forward(self, x):
        B, C, H, W = x.shape
        x = x.view(B, C * H * W)
        x = self.features(x)
        x = self.classifier(x)
        return x


def make_model():
    return FullyConnectedModel((8, 8), num_classes=10)


def batches(steps):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    for step in range(steps):
        chosen = torch.arange(50 * step, 50 * step + 50) % len(labels)
        yield images[chosen], labels[chosen]


if __name__ == "__main__":
    torch.manual_seed(0)

    from ikkuna.export import Exporter
    from ikkuna.export.subscriber import NormSubscriber

    ex = Exporter(depth=-1)
    model = make_model()
    ex.add_modules(model)
    ex.message_bus.register_subscriber(NormSubscriber('layer_gradients', subsample=10))

    # train loop here
    loss_function = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, labels in batches(int(sys.argv[1])):
        optimizer.zero_grad()
        loss_function(model(inputs), labels).backward()
        optimizer.step()
