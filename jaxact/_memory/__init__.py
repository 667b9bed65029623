"""Memory of compiled programs, also for GPUs that are not attached."""

from jaxact._memory.live import Live as Live, LiveArray as LiveArray, live as live
from jaxact._memory.memory import Memory as Memory, memory as memory
