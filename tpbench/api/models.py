"""The interface of models that transformers does not have: `model=FILE.py:NAME` (`tpbench docs models`)."""

from tpbench.workloads.train_step.model.builders import BaseModelBuilder as BaseModelBuilder
from tpbench.workloads.train_step.model.builders import ModelConfig as ModelConfig
from tpbench.workloads.train_step.model.builders import register_model as register_model
