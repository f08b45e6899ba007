"""A planner whose every answer is written down."""


class WatchedPlanner:
    """Asks another planner, and notes what it answers.

    Args:
        planner: The planner.
        note: From a request and its plan to what is kept of them; copies, not views.
    """

    def __init__(self, planner, note):
        self._planner, self._note = planner, note
        self.noted = []
        for name in ("observe", "search_due", "begin_search", "stands"):
            if hasattr(planner, name):
                setattr(self, name, getattr(planner, name))

    def plan(self, request):
        """See ``core.ports.Planner``."""
        plan = self._planner.plan(request)
        self.noted.append(self._note(request, plan))
        return plan
