"""Pipeline schedules as data: functions from numbers of stages and micro-batches to a table."""

from labkit.schedules.pipeline.gpipe import gpipe
from labkit.schedules.pipeline.interleaved import interleaved
from labkit.schedules.pipeline.layerwise import layerwise
from labkit.schedules.pipeline.one_forward_one_backward import one_forward_one_backward
from labkit.schedules.pipeline.pipedream import pipedream
from labkit.schedules.pipeline.schedule_table import PipelineSchedule, ScheduleTable
from labkit.schedules.pipeline.wavefront import wavefront
from labkit.schedules.pipeline.zero_bubble import zero_bubble, zero_bubble_h2

PIPELINE: dict[str, PipelineSchedule[...]] = {
    "layerwise": layerwise,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zero_bubble_h2": zero_bubble_h2,
    "pipedream": pipedream,
    "wavefront": wavefront,
}

__all__ = [
    "PIPELINE",
    "PipelineSchedule",
    "ScheduleTable",
    "gpipe",
    "interleaved",
    "layerwise",
    "one_forward_one_backward",
    "pipedream",
    "wavefront",
    "zero_bubble",
    "zero_bubble_h2",
]
