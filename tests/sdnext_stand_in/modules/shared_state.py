class State:
    def __init__(self):
        self.jobs = []  # as they began
        self.open = []
        self.steps = []
        self.interrupted, self.textinfo, self.sampling_steps = False, None, 0
        self._sampling_step = 0

    @property
    def sampling_step(self):
        return self._sampling_step

    @sampling_step.setter
    def sampling_step(self, value):
        self._sampling_step = value
        self.steps.append(value)

    def begin(self, title="", task_id=0, api=None):
        self.interrupted, self.sampling_step, self.sampling_steps, self.textinfo = False, 0, 0, None
        self.jobs.append(title)
        self.open.append(len(self.jobs))
        return len(self.jobs)

    def end(self, task_id=None, api=None):
        self.open.remove(task_id)
