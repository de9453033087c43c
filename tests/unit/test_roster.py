"""The roster's decisions: who gets a place, when the run begins and ends, what a worker is told.

Time is a number that the tests hand in; nothing here waits.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncmesh.config import Config
from asyncmesh.errors import MeshError
from asyncmesh.runtime.messages import ALL_STAGES, Hello, Lost, Phase, Report, State
from asyncmesh.runtime.roster import Roster, explain_missing, versions_here

VERSIONS = {"asyncmesh": "0.1.0", "torch": "2.13.0+cpu", "torchft": "0.2.0"}
OWN = {"train.device": "cuda", "train.threads": 7, "output_dir": "/elsewhere"}


def roster_of(stages: int = 2, replicas: int = 2) -> Roster:
    mesh = {"stages": stages, "replicas": replicas}
    return Roster(Config.from_dict({"mesh": mesh, "train": {"updates": 40}}), VERSIONS)


def hello(replica: int, first: int = 0, last: int = 1, job: str = "job", **more: Any) -> Hello:
    fields = {"host": f"host-of-{job}", "versions": VERSIONS} | more
    return Hello(job=job, replica=replica, first=first, last=last, **fields)


def report(
    stage: int, replica: int, state: State, job: str = "job", first_event: int = 0, **more: Any
) -> Report:
    return Report(
        job=job, replica=replica, stage=stage, state=state, first_event=first_event, **more
    )


def tell(roster: Roster, state: State, *places: tuple[int, int], now_s: float = 1.0) -> None:
    for stage, replica in places:
        roster.heard(report(stage, replica, state), now_s)


def lose(roster: Roster, *places: tuple[int, int], reason: str = "gone", job: str = "job") -> None:
    for stage, replica in places:
        lost = Lost(job=job, replica=replica, first=stage, last=stage, reason=reason)
        roster.lost(lost)


def phase_of(roster: Roster) -> Phase:
    return roster.phase


ALL = [(0, 0), (1, 0), (0, 1), (1, 1)]


def running() -> Roster:
    """2 stages, 2 replicas, all training."""
    roster = roster_of()
    for replica in range(2):
        roster.claim(hello(replica), 0.0)
    tell(roster, "ready", *ALL)
    tell(roster, "training", *ALL)
    assert phase_of(roster) == "running"
    return roster


def refusal(roster: Roster, asks: Hello, now_s: float = 1.0) -> str:
    before = (dict(roster.places), dict(roster.attempts))
    with pytest.raises(MeshError) as refused:
        roster.claim(asks, now_s)
    assert (roster.places, roster.attempts) == before
    assert "\n" not in str(refused.value)
    return str(refused.value)


# -- places ----------------------------------------------------------------------------------------
def test_who_comes_first_gets_the_place_and_who_comes_second_is_told_who_has_it() -> None:
    roster = roster_of()
    roster.claim(hello(0, job="one"), 0.0)
    assert [(p, roster.places[p].job) for p in roster.places] == [((0, 0), "one"), ((1, 0), "one")]
    for first, last in ((0, 0), (1, 1), (0, 1)):
        reason = refusal(roster, hello(0, first, last, job="two"))
        assert f"stage {first} of replica 0 is already taken by host-of-one" in reason


def test_a_host_gets_all_of_what_it_asks_for_or_nothing() -> None:
    roster = roster_of(stages=3)
    roster.claim(hello(0, 2, 2, job="one"), 0.0)
    assert "stage 2" in refusal(roster, hello(0, 0, 2, job="two"))
    roster.claim(hello(0, 0, 1, job="two"), 0.0)
    assert roster.missing() == [(0, 1), (1, 1), (2, 1)]


def test_a_job_may_repeat_its_claim_and_keeps_what_it_has_told() -> None:
    """Every worker of a job asks for all of the job's places."""
    roster = roster_of()
    roster.claim(hello(0), 0.0)
    tell(roster, "ready", (0, 0))
    roster.claim(hello(0), 2.0)
    assert roster.places[0, 0].state == "ready"
    assert roster.attempts == {}


def test_a_question_without_a_job_takes_nothing() -> None:
    roster = roster_of()
    roster.claim(hello(0, job=""), 0.0)
    assert roster.places == {}
    roster.claim(hello(0, job="one"), 0.0)
    assert "already taken" in refusal(roster, hello(0, job=""))
    lose(roster, (0, 0), job="one")
    roster.claim(hello(0, 0, 0, job=""), 0.0)
    assert (roster.places[0, 0].job, roster.attempts) == ("one", {})


def test_who_asks_for_the_last_stage_without_knowing_it_gets_all_from_the_first_on() -> None:
    roster = roster_of(stages=3, replicas=1)
    roster.claim(hello(0, 1, ALL_STAGES), 0.0)
    assert sorted(roster.places) == [(1, 0), (2, 0)]


@pytest.mark.parametrize(("first", "last"), [(0, 2), (2, 2), (1, 0), (5, ALL_STAGES)])
def test_stages_that_are_not_there_are_refused_with_those_that_are(first: int, last: int) -> None:
    shown = 1 if last == ALL_STAGES else last
    assert f"--stages {first}-{shown}: " in refusal(roster_of(), hello(0, first, last))
    assert "give a range within 0-1" in refusal(roster_of(), hello(0, first, last))


def test_a_replica_that_is_not_there_is_refused_with_those_that_are() -> None:
    assert "--replica 2: " in refusal(roster_of(), hello(2))
    assert "give 0 to 1" in refusal(roster_of(), hello(2))


def test_nobody_gets_a_place_in_a_run_that_is_ending() -> None:
    roster = running()
    lose(roster, (0, 1))
    roster.stop()
    assert refusal(roster, hello(1, job="two")) == "this run is ending; start another"


def test_what_is_missing_is_told_in_words() -> None:
    roster = roster_of(stages=3)
    assert explain_missing(roster.missing()) == (
        "stage 0 of replica 0, stage 1 of replica 0, stage 2 of replica 0, stage 0 of replica 1"
        " and 2 more"
    )
    roster.claim(hello(0, 0, 2), 0.0)
    roster.claim(hello(1, 0, 1), 0.0)
    assert explain_missing(roster.missing()) == "stage 2 of replica 1"


# -- versions and settings -------------------------------------------------------------------------
@pytest.mark.parametrize("torch", ["2.13.0", "2.13.0+cu130", "2.13.0+cpu"])
def test_a_versions_build_does_not_matter(torch: str) -> None:
    roster = roster_of()
    roster.claim(hello(0, versions=VERSIONS | {"torch": torch}), 0.0)
    assert len(roster.places) == 2


@pytest.mark.parametrize("package", ["asyncmesh", "torch", "torchft"])
@pytest.mark.parametrize("version", ["2.13.1", "2.13", None])
def test_another_release_is_refused_with_the_command_that_installs_the_right_one(
    package: str, version: str | None
) -> None:
    theirs = VERSIONS | {package: version or ""}
    if version is None:
        del theirs[package]
    reason = refusal(roster_of(), hello(0, versions=theirs))
    right = VERSIONS[package].split("+")[0]
    assert f"{package} {version or 'none'} on host-of-job, but {right} at the coordinator" in reason
    assert f'pip install "{package}=={right}"' in reason


def test_the_versions_of_this_host_are_those_it_is_compared_with() -> None:
    assert versions_here().keys() == VERSIONS.keys()
    roster = Roster(Config(), versions_here())
    roster.claim(hello(0, versions=versions_here()), 0.0)
    assert len(roster.places) == 2


def test_a_hosts_own_settings_and_those_that_agree_are_welcome() -> None:
    roster = roster_of()
    agreeing = {"train.updates": 40, "mesh.stages": 2, "optimizer.warmup_updates": 4}
    roster.claim(hello(0, settings=OWN | agreeing), 0.0)
    assert len(roster.places) == 2


def test_settings_that_differ_are_all_named_with_both_values_and_no_others() -> None:
    theirs = OWN | {"train.updates": 41, "mesh.stages": 2, "optimizer.name": "sgd", "no.such": 1}
    reason = refusal(roster_of(), hello(0, settings=theirs))
    assert "train.updates = 41 here, 40 at the coordinator" in reason
    assert "optimizer.name = 'sgd' here, 'nadamw' at the coordinator" in reason
    assert "no.such = 1 here, None at the coordinator" in reason
    for name in ("mesh.stages", *OWN):
        assert name not in reason


# -- phases ----------------------------------------------------------------------------------------
def test_a_run_begins_with_the_last_worker_that_is_ready() -> None:
    roster = roster_of()
    roster.claim(hello(0), 0.0)
    tell(roster, "ready", (0, 0), (1, 0), now_s=3.0)
    assert (phase_of(roster), roster.started_s) == ("gathering", None)
    roster.claim(hello(1), 4.0)
    tell(roster, "ready", (1, 1), now_s=5.0)
    tell(roster, "starting", (0, 1), now_s=6.0)
    assert (phase_of(roster), roster.started_s) == ("gathering", None)
    tell(roster, "ready", (0, 1), now_s=7.0)
    assert (phase_of(roster), roster.started_s) == ("running", 7.0)
    tell(roster, "training", *ALL, now_s=9.0)
    assert roster.started_s == 7.0


def test_a_run_is_over_with_the_last_worker_that_finishes() -> None:
    roster = running()
    tell(roster, "finished", *ALL[:3])
    assert phase_of(roster) == "running"
    tell(roster, "finished", ALL[3])
    assert phase_of(roster) == "over"


def test_a_run_that_is_stopped_goes_on_until_its_workers_have_finished() -> None:
    roster = running()
    roster.stop()
    assert phase_of(roster) == "stopping"
    tell(roster, "training", *ALL)
    assert phase_of(roster) == "stopping"
    tell(roster, "finished", *ALL)
    assert phase_of(roster) == "over"
    roster.stop()
    assert phase_of(roster) == "over"


def test_a_run_that_is_stopped_before_it_began_is_over() -> None:
    roster = roster_of()
    roster.claim(hello(0), 0.0)
    roster.stop()
    assert phase_of(roster) == "over"
    tell(roster, "ready", (0, 0))
    assert (phase_of(roster), roster.started_s) == ("over", None)


@pytest.mark.parametrize("phase", ["running", "stopping"])
def test_a_worker_that_diverged_stops_the_run_and_the_others_finish(phase: Phase) -> None:
    roster = running()
    if phase == "stopping":
        roster.stop()
    roster.heard(report(1, 0, "diverged", error="it became nan"), 2.0)
    assert phase_of(roster) == "stopping"
    assert [(s, r, p.error) for s, r, p in roster.failures()] == [(1, 0, "it became nan")]
    tell(roster, "finished", (0, 0), (0, 1), (1, 1))
    assert phase_of(roster) == "over"


def test_everybody_knows_that_it_is_over_when_all_have_been_told_or_have_ended() -> None:
    roster = running()
    roster.phase = "over"
    assert not roster.all_know_it_is_over()
    lose(roster, (0, 0))
    tell(roster, "finished", (1, 0))
    assert roster.phase_for(report(0, 1, "training")) == "over"
    assert not roster.all_know_it_is_over()
    assert roster.phase_for(report(1, 1, "training")) == "over"
    assert roster.all_know_it_is_over()


# -- lost workers ----------------------------------------------------------------------------------
def test_a_lost_worker_has_failed_for_the_first_reason_that_was_given() -> None:
    roster = running()
    lose(roster, (0, 1), reason="killed by signal 9")
    lose(roster, (0, 1), reason="another reason")
    assert [(s, r, p.error) for s, r, p in roster.failures()] == [(0, 1, "killed by signal 9")]
    assert (phase_of(roster), roster.replicas_alive()) == ("running", 1)


def test_what_a_worker_said_itself_is_the_reason_why_it_is_lost() -> None:
    roster = running()
    roster.heard(report(0, 1, "training", error="out of memory"), 2.0)
    lose(roster, (0, 1), reason="exit code 1")
    assert roster.places[0, 1].error == "out of memory"


def test_a_worker_that_finished_is_not_lost_when_its_process_ends() -> None:
    roster = running()
    tell(roster, "finished", (0, 0))
    lose(roster, (0, 0), reason="exit code 0")
    assert (roster.failures(), roster.replicas_alive()) == ([], 2)


def test_a_run_whose_last_workers_are_lost_is_over() -> None:
    roster = running()
    tell(roster, "finished", (0, 0), (1, 0))
    lose(roster, (0, 1))
    assert phase_of(roster) == "running"
    lose(roster, (1, 1))
    assert phase_of(roster) == "over"


def test_a_launcher_loses_the_places_of_its_own_job_and_no_others() -> None:
    roster = running()
    lose(roster, *ALL, job="another")
    assert roster.failures() == []
    roster.lost(Lost(job="job", replica=1, first=0, last=1, reason="killed"))
    assert [(stage, replica) for stage, replica, _ in roster.failures()] == [(0, 1), (1, 1)]


def test_who_is_silent_for_half_a_minute_is_lost_and_who_is_not_is_not() -> None:
    roster = running()
    tell(roster, "finished", (1, 0), now_s=2.0)
    tell(roster, "training", (0, 1), (1, 1), now_s=10.0)
    roster.forget_the_silent(31.0)
    assert roster.failures() == []
    roster.forget_the_silent(31.5)
    assert [(s, r, p.error) for s, r, p in roster.failures()] == [(0, 0, "was not heard for 30 s")]
    roster.forget_the_silent(99.0)
    assert phase_of(roster) == "over"


def test_nobody_is_lost_for_being_silent_before_the_run_began() -> None:
    roster = roster_of()
    roster.claim(hello(0), 0.0)
    roster.forget_the_silent(1000.0)
    assert roster.failures() == []


def test_a_place_that_nobody_has_cannot_be_lost() -> None:
    roster = roster_of()
    lose(roster, (0, 0))
    assert (roster.places, phase_of(roster)) == ({}, "gathering")


def test_a_run_all_of_whose_workers_were_lost_before_it_began_is_over() -> None:
    roster = roster_of(replicas=1)
    roster.claim(hello(0), 0.0)
    tell(roster, "failed", (0, 0))
    lose(roster, (1, 0), reason="killed by signal 15")
    assert phase_of(roster) == "over"


def test_a_run_begins_without_a_replica_that_was_lost_while_the_others_gathered() -> None:
    roster = roster_of()
    roster.claim(hello(0), 0.0)
    roster.claim(hello(1), 0.0)
    tell(roster, "ready", (0, 0), (1, 1))
    lose(roster, (0, 1), (1, 1), reason="out of memory")
    assert phase_of(roster) == "gathering"
    tell(roster, "ready", (1, 0))
    assert (phase_of(roster), roster.replicas_alive()) == ("running", 1)


def test_the_other_stages_of_a_replica_that_lost_one_are_told_that_it_is_over_for_them() -> None:
    roster = running()
    lose(roster, (0, 1))
    answers = [roster.phase_for(report(stage, r, "training")) for stage, r in ALL]
    assert answers == ["running", "running", "over", "over"]
    assert not roster.all_know_it_is_over()


# -- places that are taken again -------------------------------------------------------------------
def test_a_place_unheard_of_may_be_taken_after_ten_seconds_and_no_sooner() -> None:
    roster = roster_of()
    roster.claim(hello(0, job="one"), 100.0)
    assert "already taken" in refusal(roster, hello(0, job="two"), now_s=110.0)
    roster.claim(hello(0, job="two"), 110.5)
    assert {place.job for place in roster.places.values()} == {"two"}
    assert roster.attempts == {0: 1}


def test_a_place_that_reports_is_kept_however_long_ago_it_was_claimed() -> None:
    roster = roster_of()
    roster.claim(hello(0, job="job"), 0.0)
    tell(roster, "starting", (0, 0), (1, 0), now_s=95.0)
    assert "already taken" in refusal(roster, hello(0, job="two"), now_s=100.0)


def test_a_place_whose_worker_finished_is_not_taken_again() -> None:
    roster = running()
    tell(roster, "finished", (0, 0), (1, 0), now_s=2.0)
    assert "already taken" in refusal(roster, hello(0, job="two"), now_s=100.0)


def test_a_replica_that_lost_a_worker_begins_anew_as_a_whole() -> None:
    """Its other stage holds weights of an attempt that is gone: it is asked to leave, and the
    other replica notices nothing.
    """
    roster = running()
    tell(roster, "failed", (1, 1), now_s=2.0)
    roster.claim(hello(1, 1, 1, job="two"), 3.0)
    assert roster.attempts == {1: 1}
    assert roster.missing() == [(0, 1)]
    assert roster.places[1, 1].job == "two"
    with pytest.raises(MeshError, match="stage 0 of replica 1 is not held by this worker any more"):
        roster.heard(report(0, 1, "training"), 3.0)
    roster.claim(hello(1, 0, 0, job="three"), 4.0)
    assert roster.attempts == {1: 1}
    assert roster.missing() == []
    assert {roster.places[s, 0].job for s in (0, 1)} == {"job"}


def test_attempts_count_up_each_time_a_replica_begins_anew() -> None:
    roster = running()
    for attempt in range(1, 4):
        lose(roster, (0, 1), (1, 1), job=roster.places[0, 1].job)
        roster.claim(hello(1, job=f"attempt {attempt}"), 5.0)
        assert roster.attempts == {1: attempt}
        assert roster.failures() == []


def test_the_same_job_may_begin_a_failed_replica_anew() -> None:
    roster = running()
    lose(roster, (0, 1))
    roster.claim(hello(1), 2.0)
    assert (roster.places[0, 1].state, roster.attempts) == ("starting", {1: 1})


def test_a_jobs_workers_may_come_far_apart_and_are_of_one_attempt() -> None:
    """Their edges meet under the attempt's name in the store."""
    roster = roster_of()
    roster.claim(hello(0), 0.0)
    tell(roster, "starting", (0, 0), now_s=11.0)
    roster.claim(hello(0), 11.0)  # the worker of stage 1 comes
    assert roster.attempts == {}


def test_a_replica_that_comes_late_gathers_until_all_its_stages_are_ready() -> None:
    roster = running()
    lose(roster, (0, 1))
    lose(roster, (1, 1))

    def answers() -> list[Phase]:
        taken = [place for place in ALL if place in roster.places]
        return [roster.phase_for(report(s, r, "ready", roster.places[s, r].job)) for s, r in taken]

    roster.claim(hello(1, 0, 0, job="one"), 2.0)
    roster.heard(report(0, 1, "ready", "one"), 2.0)
    assert answers() == ["running", "running", "gathering"]
    roster.claim(hello(1, 1, 1, job="two"), 3.0)
    assert answers() == ["running", "running", "gathering", "gathering"]
    roster.heard(report(1, 1, "ready", "two"), 4.0)
    assert answers() == ["running"] * 4
    assert roster.started_s == 1.0


# -- reports ---------------------------------------------------------------------------------------
def test_a_report_for_a_place_that_another_has_is_refused() -> None:
    roster = running()
    stranger = report(0, 0, "training", job="two", events=["x"])
    for refuses in (roster.news, roster.phase_for, lambda told: roster.heard(told, 2.0)):
        with pytest.raises(MeshError, match="not held by this worker any more"):
            refuses(stranger)
    assert (roster.places[0, 0].events, roster.places[0, 0].heard_s) == (0, 1.0)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans())))
def test_every_event_is_news_once_however_many_answers_are_lost(
    steps: list[tuple[int, bool]],
) -> None:
    """A step: so many things happen, then a report goes out, whose answer is lost or not."""
    roster = roster_of()
    roster.claim(hello(0), 0.0)
    happened, reported, taken = 0, 0, []
    for count, answered in [*steps, (0, True)]:
        happened += count
        events = [str(number) for number in range(reported, happened)]
        told = report(0, 0, "training", first_event=reported, events=events)
        taken += roster.news(told).events
        if answered:
            reported = happened
    assert taken == [str(number) for number in range(happened)]


def test_news_is_the_report_itself_but_for_the_events_that_are_known() -> None:
    roster = roster_of()
    roster.claim(hello(0), 0.0)
    first = report(0, 0, "ready", events=["a", "b"])
    assert roster.news(first) == first
    again = report(0, 0, "training", events=["a", "b", "c"], error="why")
    assert roster.news(again) == again.model_copy(update={"events": ["c"]})
