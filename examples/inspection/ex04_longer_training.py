"""The same gradients after 200 iterations: they reach earlier timesteps."""

import ex03_all_samples


def main(directory="."):
    return ex03_all_samples.main(directory, iterations=200)


if __name__ == "__main__":
    main()
