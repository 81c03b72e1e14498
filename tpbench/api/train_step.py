"""The types of variants of the train step: `my_fn(problem: TrainStep, context: Context) -> Trainer`."""

from tpbench.measure.session import Context as Context
from tpbench.outside.loading import variant as variant
from tpbench.workloads.train_step.model import models as models
from tpbench.workloads.train_step.problem import TrainStep as TrainStep
from tpbench.workloads.train_step.training.losses import torch_loss as torch_loss
from tpbench.workloads.train_step.training.trainer import TorchTrainer as TorchTrainer
from tpbench.workloads.train_step.training.trainer import Trainer as Trainer
