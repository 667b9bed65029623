"""Examples in docstrings run as written."""

import doctest
import importlib
import pkgutil

import pytest

import jaxact
import jaxact_kernels

MODULES = [
    found.name
    for package in (jaxact, jaxact_kernels)
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0
