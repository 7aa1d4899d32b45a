"""Old place → new place of every module that moves (issue 31)."""

def table(old, new, names, **renamed):
    out = {}
    for name in names.split():
        out[f"{old}.{name}"] = f"{new}.{name}"
    for name, to in renamed.items():
        out[f"{old}.{name}"] = f"{new}.{to}"
    return out

C, M, O, L, T = "evergrad_coordinator", "evergrad_manifest", "evergrad_operator", "evergrad_cli", "evergrad_trainer"
MODULES = {}
def add(*a, **k): MODULES.update(table(*a, **k))

# common
add(C, "evergrad_common", "addresses causes contract metrics publishing secret text", evaluated="evaluation_report", late_rows="stale_records", pace="step_rate", wire="codec")
add(C + ".edge", C + ".edge", "", beat="heartbeat_sender", heartbeat="heartbeat_process", live="live_feed", owner="training_process", page="page_files")
add(C + ".rules", C + ".rules", "", accounting="interruptions", departures="drains", track="downsampled_series", uses="time_accounting")

# operator
core, edge = O + ".core", O + ".edge"
add(O, core, "admission decision fleet plan policies")
add(O, core + ".objects", "config errors images installation kinds names problems raw slim times", packing="status_encoding", recipe="recipe_hash")
add(O, core + ".observe", "evaluation facts kueue memory observe pods preparation profiles spec", answer="coordinator_status", check="start_checks", usage="time_accounting", wording="pod_messages")
add(O, core + ".plan", "changes")
add(O, core + ".status", "conditions events memory_status", status="run_status")
add(O + ".policies", core + ".policies", "", ends="pod_ends", give_back="release_capacity", remember="memory_update", usage="time_accounting")
add(O, edge, "handlers logs service settings")
add(O, edge + ".api", "access connection kube lease tokens transport", recorder="event_recorder")
add(O, edge + ".cache", "cache claim_index expectations facts_index host_index namespace_profiles queue store sync")
add(O, edge + ".metrics", "fleet_page", health="endpoint", metrics="operator_metrics", vitals="health_checks")
add(O, edge + ".reconcile", "apply gang_api refusals status_writer", confirm="confirmation", follow="poll_schedule", pass_metrics="reconcile_metrics", passes="reconcile_context", progress="coordinator_poller", reconcile="reconciler")
add(O, edge + ".webhook", "certificates", intake="request_limits", webhook="server")

# command line
add(L, L + ".local", "leftovers run_files run_page validate")
cl = L + ".cluster"
add(cl, cl + ".commands", "checkpoints doctor list logs open prune restart resume stacks status submit suspend top wait")
add(cl, cl + ".commands", "local_status placement waiting", following="log_following", switching="field_switch", unused="unused_objects")
add(cl, cl + ".diagnosis", "checks claim_checks", admission="webhook_checks")
add(cl, cl + ".client", "arguments errors forwarding raw refusals", client="api_client")
add(cl, cl + ".render", "advice runs text")

# manifest
add(M, M + ".model", "base claims containers describe differences environment fields items nesting raw spelling view")
add(M, M + ".files", "sources task_files")
add(M, M + ".envelope", "script")
add(M + ".envelope", M + ".envelope", "", beside="other_pods")

# trainer
add(T, T + ".base", "bounded_file bytes_moved device_memory durable errors lock machine mixing records torch_private volume", bases="redact_sequences", host_trouble="host_errors")
add(T, T + ".distributed", "transports world", distributed="process_groups")
add(T, T + ".preflight", "", preflight="checks", preflight_memory="memory", preflight_script="script")
add(T, T + ".run", "resume", run_directory="directory", run_owner="owner", run_record="record")
add(T + ".provenance", T + ".run", "", record="provenance", redaction="redaction", request="start_request")
cmd = T + ".commands"
add(T + ".cli", cmd, "checkpoint compare_runs evaluate node nodes pod preflight prepare report run run_arguments script_runs", planning="session_plan")
MODULES[T + ".cli"] = cmd
add(T + ".checkpoint", T + ".checkpoint", "", ahead="read_ahead", evaluated="evaluated_marks", held="cached_files", restoring="restore", saving="save")
add(T + ".data", T + ".data", "", chosen="sample_subset", passes="epochs", places="start_positions", shown="sample_preview")
add(T + ".evaluation", T + ".evaluation", "", comparing="comparison", measuring="measurement", opening="setup", watching="follower")
add(T + ".node", T + ".node", "", conversation="coordinator_link", departure="drain", ends="worker_ends", scripts="script_worker", starts="worker_starts", stopping="stop_requests")
add(T + ".observers", T + ".observers", "", account="time_account", accounting="account_files", lasting="stateful_observers")
add(T + ".recipes", T + ".recipes", "", opening="setup", own="user_task")
add(T + ".report", T + ".report", "", drafts="plot_specs")
add(T + ".training", T + ".training", "", calls="task_adapter", due="schedule", refusal="step_refusal", run="components", tally="evaluation_counts")
add(T + ".worker", T + ".worker", "", announcing="run_records", beginning="init_from", ending="teardown", heartbeat="liveness", life="states", lifecycle="worker_loop", opening="setup", position="resume_position", reporting="error_reports", restoring="start_state", settling="sync_state", writing="rank_zero")

SOURCES = {C: "coordinator", "evergrad_common": "common", M: "manifest", O: "operator", L: "cli", T: "trainer_image"}
