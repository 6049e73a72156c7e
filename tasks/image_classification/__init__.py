"""Image classifiers, and labelled images from folders, manifests, tar shards and data sets."""

from lit_fsdp.tasks.image_classification.augmentation import Augmentation
from lit_fsdp.tasks.image_classification.data import ImageData
from lit_fsdp.tasks.image_classification.mixup import Mixup
from lit_fsdp.tasks.image_classification.preprocessing import Pixels
from lit_fsdp.tasks.image_classification.task import ImageClassification

__all__ = ["Augmentation", "ImageClassification", "ImageData", "Mixup", "Pixels"]
