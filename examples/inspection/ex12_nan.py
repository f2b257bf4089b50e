"""NaN in an LSTM's weights: counted for each gate, marked in yellow, and stated on the panels of the histogram."""

from pathlib import Path

import torch
from networks import Recurrent

from ikkuna.plot import rnn_heatmap, rnn_histogram
from ikkuna.probe import get_rnn_weights


def main(directory="."):
    torch.manual_seed(0)
    model = Recurrent(inputs=16, units=64)
    with torch.no_grad():
        model.rnn1.weight_hh_l0[64:128] = torch.nan  # the forget gate
        model.rnn1.weight_ih_l0[:64, :4] = torch.nan  # the input gate, for 4 of the 16 inputs
        model.rnn1.bias_hh_l0[-1] = torch.inf
    print(f"forget gate: {torch.isnan(get_rnn_weights(model)[0].gate('forget').recurrent).sum()} NaN")

    paths = [Path(directory, "nan_histogram.png"), Path(directory, "nan_heatmap.png")]
    rnn_histogram(model, "lstm", savepath=paths[0])
    (picture,) = rnn_heatmap(model, "lstm", savepath=paths[1])
    for where, count in picture.nan_report.items():
        print(f"{where}: {count}")
    return paths


if __name__ == "__main__":
    main()
