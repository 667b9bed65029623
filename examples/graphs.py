"""A graph to learn: a file of your own, or neighbours among handwritten digits.

A file of a graph is an .npz with these arrays, for N nodes, F binary features and E
directed edges (an undirected one is two):

  feature_rows, feature_cols  integers [ones]: the node and the feature of each one
  num_features                F
  labels                      integers [N], from 0 to the number of classes - 1
  senders, receivers          integers [E]
  train_index, test_index     integers: labelled nodes to learn from, nodes to score

None is empty, and no node is both learned and scored.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data
import numpy as np

FIELDS = (
    "feature_rows",
    "feature_cols",
    "num_features",
    "labels",
    "senders",
    "receivers",
    "train_index",
    "test_index",
)


@dataclass(frozen=True)
class Graph:
    """float32 features [N, F] whose rows sum to 1, int32 labels [N], and edges.

    `train` and `test` are the nodes whose labels are learned and scored, int32.
    """

    name: str
    features: np.ndarray
    labels: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    train: np.ndarray
    test: np.ndarray

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Senders and receivers, int32 [E + N], and their float32 weights.

        With a loop at each node. A weight is 1 / sqrt(degree of sender * degree of
        receiver), loops counted (Kipf and Welling 2017, arXiv:1609.02907, eq. 2).
        """
        nodes = np.arange(len(self.labels), dtype=np.int32)
        senders = np.concatenate([self.senders, nodes])
        receivers = np.concatenate([self.receivers, nodes])
        degree = np.bincount(receivers, minlength=len(nodes)).astype(np.float32)
        return senders, receivers, (degree[senders] * degree[receivers]) ** -0.5


def load(path: Path | None = None) -> Graph:
    """The graph of the file at `path`, or of the digits."""
    return digits() if path is None else read(path)


def read(path: Path) -> Graph:
    fields = data.arrays(path, FIELDS, "examples/graphs.py")
    check(fields, path)
    shape = len(fields["labels"]), int(fields["num_features"])
    features = np.zeros(shape, np.float32)
    features[fields["feature_rows"], fields["feature_cols"]] = 1
    return _graph(path.stem, features, **{k: fields[k] for k in FIELDS[3:]})


def check(fields: dict[str, np.ndarray], path: Path) -> None:
    """Raise `ValueError` where the arrays of a file are not as said above."""
    nodes, features = len(fields["labels"]), int(fields["num_features"])
    ends = dict.fromkeys(FIELDS, nodes) | {"feature_cols": features, "labels": np.inf}
    del ends["num_features"]
    for name, end in ends.items():
        found = fields[name]
        if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
            raise ValueError(
                f"{path}: {name} are {found.dtype} {list(found.shape)}; integers [n] "
                "are required, n at least 1"
            )
        if found.min() < 0 or found.max() >= end:
            wanted = "on" if end == np.inf else f"to {end - 1}"
            raise ValueError(
                f"{path}: {name} are from {found.min()} to {found.max()}; from 0 "
                f"{wanted} is required"
            )
    for pair in ("feature_rows", "feature_cols"), ("senders", "receivers"):
        lengths = [len(fields[name]) for name in pair]
        if lengths[0] != lengths[1]:
            raise ValueError(
                f"{path} has {lengths[0]} {pair[0]} and {lengths[1]} {pair[1]}: as "
                "many of each are required"
            )
    shared = np.intersect1d(fields["train_index"], fields["test_index"])
    if shared.size:
        raise ValueError(
            f"{path}: train_index and test_index share {shared.size} nodes; one that "
            "is learned may not be scored"
        )


def digits(neighbours: int = 6, labelled: int = 20) -> Graph:
    """1797 digits of 64 pixels, each joined with those it resembles most.

    The first `labelled` of each class are learned from; every image from the 797th on
    is scored.
    """
    from sklearn.datasets import load_digits
    from sklearn.neighbors import kneighbors_graph

    found: Any = load_digits()
    near = kneighbors_graph(found.data, neighbours)
    senders, receivers = near.maximum(near.T).nonzero()
    places = [np.flatnonzero(found.target == c)[:labelled] for c in range(10)]
    return _graph(
        "nearest neighbours of handwritten digits",
        found.data.astype(np.float32),
        labels=found.target,
        senders=senders,
        receivers=receivers,
        train_index=np.concatenate(places),
        test_index=np.arange(797, len(found.target)),
    )


def _graph(name: str, features: np.ndarray, **numbers: Any) -> Graph:
    """A graph of `numbers`, arrays of integers named as in a file."""
    total = features.sum(1, keepdims=True)
    found = {k: v.astype(np.int32) for k, v in numbers.items()}
    return Graph(
        name,
        features / np.maximum(total, 1),
        found["labels"],
        found["senders"],
        found["receivers"],
        train=found["train_index"],
        test=found["test_index"],
    )
