"""The public names for type checkers and editors; at run time `__init__.py` imports each at its first use."""

from matcher.alignment.align import Alignment as Alignment
from matcher.alignment.align import align as align
from matcher.alignment.find import Detections as Detections
from matcher.alignment.find import TemplateFinder as TemplateFinder
from matcher.alignment.find import find as find
from matcher.alignment.stitch import stitch as stitch
from matcher.cameras import Camera as Camera
from matcher.collection.collection import Collection as Collection
from matcher.collection.collection import MatchedSet as MatchedSet
from matcher.collection.collection import match_set as match_set
from matcher.errors import ImageError as ImageError
from matcher.errors import ImageWarning as ImageWarning
from matcher.errors import IntegrityError as IntegrityError
from matcher.errors import MatcherError as MatcherError
from matcher.errors import UsageError as UsageError
from matcher.images import read_image as read_image
from matcher.loading import load as load
from matcher.localization.map import Map as Map
from matcher.localization.pose import Pose as Pose
from matcher.pipeline import Pipeline as Pipeline
from matcher.presets import PRESETS as PRESETS
from matcher.result import Result as Result
from matcher.sequence.frames import FrameResult as FrameResult
from matcher.sequence.keyframe_map import KeyframeMap as KeyframeMap
from matcher.sequence.tracker import Tracker as Tracker
from matcher.tiling import tiled as tiled
from matcher.types import Features as Features
from matcher.types import Image as Image
from matcher.types import Matches as Matches
from matcher.types import TwoViewGeometry as TwoViewGeometry

__version__: str
__all__: list[str]
