# Every target does its own set-up; `make help` lists them.

PYTHON ?= python3
# Test files at a time: one more than cores, since some tests wait and many start processes of their own.
JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
LOCKS := $(addprefix tools/requirements/,trainer.txt torch.txt torch-cpu.txt operator.txt dev.txt)
PYDOC := examples/pydoc
# Another torch to try the rendezvous backend with.
TORCH ?= 2.15.0
OTHER := $(VENV)-torch-$(TORCH)
# Beside .venv, whose packages it sees: some fifty more, which only trackers need.
TRACKED := $(VENV)-trackers
# Only the site needs them, so that neither .venv nor CI's install grows.
SITE := $(VENV)-docs
# Likewise: what checks the files for GitHub.
GITHUB := $(VENV)-github
# Likewise: libraries that benchmarks measure Evergrad beside.
PEERS := $(VENV)-peers
# Likewise: what measures the coverage of the tests.
COVERAGE := $(VENV)-coverage
PACKAGES := $(wildcard */pyproject.toml)

# The working directory never goes onto the import path: the folder operator/ would shadow the standard library's module.
export PYTHONSAFEPATH := 1
# A folder of wheels; a CPU build of torch in it that fits this Python is taken instead of the index's build.
export TORCH_WHEELS

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help install run test test-e2e test-long test-torch-matrix test-trackers verify chaos lint check format generate architectures generated bench gpu-check bench-peers bench-recovery bench-cluster bench-cluster-pods bench-operator numbers coverage images version release chart-lint github-lint docs changes cluster cluster-down lock clean distclean

stage = @printf '\n== %s  %s\n' "$$(date +%T)" "$(1)"

help: ## list the targets
	@printf 'make TARGET, where TARGET is one of\n\n'
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)$$/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22
	@printf '\nVariables: PYTHON (the interpreter .venv is made from), TORCH_WHEELS (a folder with a CPU build of torch),\n'
	@printf '           PYTEST (arguments for make test), JOBS (test files at a time), E2E (more for make test-e2e), RUN (for make run), TORCH (for make test-torch-matrix), GPU (for make gpu-check), BENCH (for make bench, bench-recovery, bench-cluster, bench-cluster-pods and bench-operator), UPGRADE=1 (make lock: newer releases too), RELEASE (for make release), VERSION (for make version)\n'

install: $(INSTALLED) ## make .venv: the locked packages, and the packages of this repository, editable

$(INSTALLED): $(LOCKS) tools/requirements/locks.py $(PACKAGES)
	$(call stage,install)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'error: $(PYTHON) is not Python 3.11 or newer. Name one with PYTHON=, e.g. make PYTHON=python3.12 install.' >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo 'error: $(PYTHON) cannot make a virtual environment. On Debian and Ubuntu install python3-venv.' >&2; exit 1; }
	@$(BIN)/python tools/requirements/locks.py install
	@touch $@

$(PYDOC)/documents.jsonl: | $(INSTALLED)
	@$(BIN)/python $(PYDOC)/make_documents.py $@

run: $(INSTALLED) $(PYDOC)/documents.jsonl ## train the example on two local nodes: a small language model of Python's documentation, into runs/pydoc-lm
	$(BIN)/evergrad run $(PYDOC)/trainingrun.yaml --nodes 2 $(RUN)

# Files that start processes come first: the long ones must not be left for the end, when the other workers have nothing to do.
UNITS = --durations=0 --durations-min=1 -n $(JOBS) --dist loadfile --no-loadscope-reorder tests/integration tests/unit

# All is built before pytest begins, whose timeouts are for tests.
# What a cluster of this machine needs, of the profiles (1), with images or without (2), and further programs (3); nothing where KUBECONFIG names another or this machine cannot run one.
define prepare_cluster
@if [ -z '$(KUBECONFIG)' ] && PYTHONPATH=$(CURDIR)/tools $(BIN)/python -c 'import sys, bed; sys.exit(bed.unavailable() is not None)'; then \
	export PYTHONPATH=$(CURDIR)/tools && for profile in $(1); do \
		$(BIN)/python -m bed prepare --profile $$profile || exit 1; done$(if $(3), && $(BIN)/python -m bed tools $(3))$(if $(2), && $(BIN)/python -m bed.product_images --any-revision); fi
endef

# What is shown while the tests of units and processes run behind it. Images are built beside those: most of their steps take one core.
FRONT = test-e2e
# Not $(MAKE) itself: make runs a line with that name in it also when it is only to print it.
SUB_MAKE := $(MAKE)
# Tests on a cluster mostly wait for it, and those of units and processes mostly compute: side by side they take little more than the former alone.
test: override KUBECONFIG :=
test: $(INSTALLED) ## all tests: units, processes, and end to end on a cluster of this machine (PYTEST='…': only what that says)
	$(if $(PYTEST),,$(call prepare_cluster,full))
	$(call stage,tests of units and processes$(if $(PYTEST),,, behind those on a cluster))
	$(if $(PYTEST),OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST),OMP_NUM_THREADS=1 $(BIN)/python tests/side_by_side.py \
		--front '$(SUB_MAKE) --no-print-directory $(FRONT) KUBECONFIG=' --behind '$(BIN)/python -m pytest $(UNITS)')

test-e2e: $(INSTALLED) ## the tests on a cluster: a two-node Kubernetes that they start here (as root), or the one KUBECONFIG names
	$(call stage,tests on a cluster)
	$(call prepare_cluster,full,images)
	OMP_NUM_THREADS=1 EVERGRAD_E2E_KUBECONFIG='$(KUBECONFIG)' $(BIN)/python -m pytest $(if $(KUBECONFIG),,tests/bed_tests) tests/e2e --verbose --durations=0 --durations-min=1 $(E2E)

# The newer control plane has a bed of its own, which comes and goes with these tests.
define test_next
OMP_NUM_THREADS=1 EVERGRAD_E2E_KUBECONFIG= EVERGRAD_BED=$(or $(EVERGRAD_BED),3) EVERGRAD_BED_PROFILE=next \
	$(BIN)/python -m pytest -m long tests/e2e/test_pod_groups.py --verbose --durations=0 --durations-min=1
endef

test-long: $(INSTALLED) ## the tests that take minutes and rarely find anything, which `make test` leaves out
	$(call stage,long tests)
	$(call prepare_cluster,full next kwok,images,kueue coscheduling promconfig prometheus)
	OMP_NUM_THREADS=1 EVERGRAD_E2E_KUBECONFIG='$(KUBECONFIG)' $(BIN)/python tests/side_by_side.py \
		--front '$(BIN)/python -m pytest -m long $(if $(KUBECONFIG),,tests/bed_tests) tests/e2e --verbose --durations=0 --durations-min=1' \
		--behind '$(BIN)/python -m pytest -m long $(UNITS)'
	$(if $(KUBECONFIG),,$(call test_next))

chaos: $(INSTALLED) ## kill and freeze a run EVENTS=300 times, drawn by SEED=7, and compare it with an undisturbed one; KIND=transfer, asynchronous, coordinator
	$(call stage,chaos)
	OMP_NUM_THREADS=1 CHAOS_EVENTS=$(or $(EVENTS),300) CHAOS_SEED=$(or $(SEED),7) CHAOS_KIND=$(or $(KIND),any) $(BIN)/python -m pytest tests/integration/elastic/test_chaos.py

$(OTHER)/.installed: $(PACKAGES)
	$(call stage,torch $(TORCH))
	@$(PYTHON) -m venv $(OTHER)
	@$(OTHER)/bin/python -m pip install --disable-pip-version-check $(if $(TORCH_WHEELS),--find-links $(TORCH_WHEELS)) \
		torch==$(TORCH) numpy 'setuptools>=77' pytest pytest-timeout
	@$(OTHER)/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation \
		$(addprefix --editable ,common coordinator manifest cli trainer_image)
	@touch $@

# Without a CPU build in TORCH_WHEELS this takes the index's torch, with gigabytes of CUDA packages on Linux.
test-torch-matrix: $(INSTALLED) $(OTHER)/.installed ## the rendezvous backend with another torch (TORCH=2.15.0), in a .venv of its own
	$(call stage,torch $(TORCH))
	OMP_NUM_THREADS=1 EVERGRAD_TEST_PYTHON=$(abspath $(OTHER)/bin/python) $(BIN)/python -m pytest tests/unit/worker/test_torch_behaviours.py \
		tests/integration/elastic/test_rendezvous_changes.py tests/integration/elastic/test_rendezvous_scripts.py -k 'not accelerate and not transformers'
	$(OTHER)/bin/python -m pytest --config-file=/dev/null --noconftest --import-mode=importlib -p no:cacheprovider tests/unit/test_torch_private.py

# A .venv (1) that sees the packages of the one of all.
define make_beside
@$(PYTHON) -m venv $(1)
@$(BIN)/python -c 'import sys, sysconfig; open(sys.argv[1] + "/beside.pth", "w").write("import site; site.addsitedir(%r)\n" % sysconfig.get_path("purelib"))' \
	"$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
endef

$(TRACKED)/.installed: $(INSTALLED) trainer_image/pyproject.toml
	$(call stage,libraries of trackers)
	$(call make_beside,$(TRACKED))
	@$(TRACKED)/bin/python -m pip install --disable-pip-version-check 'evergrad-trainer[wandb,mlflow,aim]'
	@touch $@

# Their newest releases that trainer_image/pyproject.toml allows; nothing is sent anywhere.
test-trackers: $(INSTALLED) $(TRACKED)/.installed ## trackers with their own libraries, through kills of rank 0 and of whole runs, in a .venv of its own
	$(call stage,trackers)
	$(TRACKED)/bin/python -c 'import aim, mlflow, wandb; print("aim", aim.__version__, "mlflow", mlflow.__version__, "wandb", wandb.__version__)'
	OMP_NUM_THREADS=1 $(TRACKED)/bin/python -m pytest tests/integration/run/test_observers.py -k 'tracker or rank_0_dies_twice or shows_each_step_once'

lint: $(INSTALLED) ## ruff, mypy and the import directions
	$(call stage,ruff)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(call stage,mypy)
	$(BIN)/mypy
	$(call stage,import directions)
	PYTHONPATH=$(CURDIR)/tools/monitoring $(BIN)/lint-imports --no-logo

check: $(INSTALLED) ## a minute before each commit: style, types and unit tests of what has changed (SINCE=main: since that commit)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/check.py $(if $(SINCE),--since $(SINCE))

format: $(INSTALLED) ## rewrite the sources as lint wants them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

generate: $(INSTALLED) ## write the generated files anew
	$(BIN)/python -m evergrad_manifest.generate
	cp crds/trainingrun.yaml charts/evergrad/files/trainingrun.yaml
	PYTHONPATH=$(CURDIR)/tools/monitoring $(BIN)/python -m evergrad_monitoring.generate
	$(BIN)/python tools/docs/chart_values.py
	$(BIN)/python tools/docs/pictures.py
	$(BIN)/python examples/quickstart/make_documents.py
	PYTHONPATH=$(CURDIR)/tests:$(CURDIR)/tests/unit/operator $(BIN)/python -m run_samples
	$(BIN)/python examples/gitops/argocd/make_argocd_cm.py

architectures: $(INSTALLED) ## try every causal architecture of transformers, and write their page; ten minutes
	HF_HUB_OFFLINE=1 $(BIN)/python tools/docs/architectures.py

generated: $(INSTALLED) ## check that the generated files are up to date
	$(call stage,generated files)
	$(BIN)/python -m evergrad_manifest.generate --check
	cmp crds/trainingrun.yaml charts/evergrad/files/trainingrun.yaml
	PYTHONPATH=$(CURDIR)/tools/monitoring $(BIN)/python -m evergrad_monitoring.generate --check
	$(BIN)/python tools/docs/chart_values.py --check
	$(BIN)/python tools/docs/pictures.py --check
	$(BIN)/python examples/quickstart/make_documents.py --check

verify: generated chart-lint github-lint docs ## all that CI checks: generated files, chart, files for GitHub, site, lint, tests
	$(SUB_MAKE) --no-print-directory test FRONT='lint test-e2e'
	$(call stage,verified)

bench: $(INSTALLED) ## measure against a hand-written loop and transformers' Trainer, into tools/benchmarks/results/
	PYTHONPATH=$(CURDIR)/tools/benchmarks $(BIN)/python tools/benchmarks/run.py $(BENCH)

gpu-check: $(INSTALLED) ## check and measure on this machine's accelerator, into tools/benchmarks/results/gpu.md; exits with 69 where there is none
	PYTHONPATH=$(CURDIR)/tools/benchmarks $(BIN)/python tools/benchmarks/gpu_check.py $(GPU)

$(PEERS)/.installed: $(INSTALLED) tools/requirements/peers.in
	$(call stage,libraries to measure beside)
	$(call make_beside,$(PEERS))
	@$(PEERS)/bin/python -m pip install --disable-pip-version-check --requirement tools/requirements/peers.in
	@touch $@

bench-peers: $(INSTALLED) $(PEERS)/.installed ## measure packing beside TRL and preparation beside datasets, in a .venv of their own
	PYTHONPATH=$(CURDIR)/tools/benchmarks $(PEERS)/bin/python tools/benchmarks/run.py $(or $(BENCH),sft-packing prepare-mixture)

bench-recovery: $(INSTALLED) ## measure recovery beside stock torchrun, and the cost of being elastic
	PYTHONPATH=$(CURDIR)/tools/benchmarks $(BIN)/python tools/benchmarks/run.py recovery $(BENCH)

bench-cluster: $(INSTALLED) ## measure the operator beside Kubeflow Trainer on a control plane with made-up nodes (as root)
	EVERGRAD_BED=$(or $(EVERGRAD_BED),9) PYTHONPATH=$(CURDIR)/tools/benchmarks:$(CURDIR)/tools:$(CURDIR)/tests $(BIN)/python tools/benchmarks/cluster_scale.py $(BENCH)

bench-cluster-pods: $(INSTALLED) ## measure a killed pod on real nodes beside an Indexed Job with stock torchrun, and the quickstart's start (as root)
	EVERGRAD_BED=$(or $(EVERGRAD_BED),9) PYTHONPATH=$(CURDIR)/tools/benchmarks:$(CURDIR)/tools:$(CURDIR)/tests:$(CURDIR)/tests/e2e $(BIN)/python tools/benchmarks/cluster_pods.py $(BENCH)

bench-operator: $(INSTALLED) ## measure a start of the operator over 10,000 runs and its polls and scrapes, compared with commit 10950962
	PYTHONPATH=$(CURDIR)/tools/benchmarks $(BIN)/python tools/benchmarks/operator_start.py $(BENCH)

numbers: $(INSTALLED) ## count sizes, density, comments and fragments of the product, their trend (SINCE=HEAD~50), and the bytes of the CRD
	@$(BIN)/python tools/numbers/readability.py --since $(or $(SINCE),HEAD~50) $(COMMITS)
	@$(BIN)/python -m evergrad_manifest.generate --sizes

$(COVERAGE)/.installed: $(INSTALLED) tools/requirements/coverage.in
	$(call stage,install what measures coverage)
	$(call make_beside,$(COVERAGE))
	@$(COVERAGE)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tools/requirements/coverage.in
	@touch $@

# A failed test does not prevent the report, but make still fails.
coverage: $(INSTALLED) $(COVERAGE)/.installed ## branch coverage of the unit tests by package, and what they do not cover (PYTEST='…': of those tests instead)
	$(call stage,coverage)
	@rm -f .coverage .coverage.*
	PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 $(COVERAGE)/bin/python -m coverage run -m pytest -p no:cacheprovider $(or $(PYTEST),-n $(JOBS) --dist loadfile tests/unit); result=$$?; \
		$(COVERAGE)/bin/python -m coverage combine --quiet && $(COVERAGE)/bin/python -m coverage json --quiet -o .coverage.json && \
		$(BIN)/python tools/numbers/coverage_report.py .coverage.json && exit $$result

images: $(INSTALLED) ## build both container images where something changed, and load them where the cluster is up (as root)
	PYTHONPATH=$(CURDIR)/tools $(BIN)/python -m bed.product_images

# Only the standard library, and never .venv, which is installed again after each change of a version.
version: ## print the version, or write VERSION=0.3.0 into every place that names one
	@$(PYTHON) tools/release/raise_version.py $(if $(filter command line,$(origin VERSION)),'$(VERSION)')

release: $(INSTALLED) ## write wheels, chart, images, bills of materials and checksums into dist/ (RELEASE=--without-images: where one is not root)
	$(call stage,release)
	PYTHONPATH=$(CURDIR)/tests:$(CURDIR)/tools:$(CURDIR)/tools/requirements:$(CURDIR)/tools/release $(BIN)/python tools/release/make_release.py $(RELEASE)

chart-lint: $(INSTALLED) ## helm lint --strict, ct lint, the chart's own tests (helm-unittest), and kubeconform on what it renders
	$(call stage,chart)
	PYTHONPATH=$(CURDIR)/tools $(BIN)/python -m bed.chart

$(GITHUB)/.installed: tools/requirements/github.in
	$(call stage,install what checks the files for GitHub)
	@$(PYTHON) -m venv $(GITHUB)
	@$(GITHUB)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tools/requirements/github.in
	@touch $@

github-lint: $(INSTALLED) $(GITHUB)/.installed ## actionlint on the workflows, and JSON schemas of the workflows and the issue forms
	$(call stage,files for GitHub)
	PYTHONPATH=$(CURDIR)/tools $(BIN)/python -m bed.workflows
	$(GITHUB)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yaml
	$(GITHUB)/bin/check-jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(GITHUB)/bin/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml

$(SITE)/.installed: tools/requirements/docs.in
	$(call stage,install what builds the site)
	@$(PYTHON) -m venv $(SITE)
	@$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tools/requirements/docs.in
	@touch $@

# Never --quiet: MkDocs then counts no warnings, and --strict ends nothing.
docs: $(INSTALLED) $(SITE)/.installed ## build the site into build/site, where a broken link, a page outside the navigation or cut-off text is an error
	$(call stage,site)
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict
	PYTHONPATH=$(CURDIR)/tests:$(CURDIR)/tests/integration/helpers $(BIN)/python tools/docs/check_widths.py build/site

changes: $(INSTALLED) ## print the section of the changelog that the fragments in changes/ make
	@$(BIN)/towncrier build --draft --version Unreleased

cluster: $(INSTALLED) ## a real two-node Kubernetes on this machine (as root); its kubeconfig is .cluster/kubeconfig
	PYTHONPATH=$(CURDIR)/tools $(BIN)/python -m bed up

cluster-down: $(INSTALLED) ## take it down, whatever state it is in
	PYTHONPATH=$(CURDIR)/tools $(BIN)/python -m bed down

lock: $(INSTALLED) ## write tools/requirements/*.txt anew from the .in files (TORCH_WHEELS adds its CPU builds' hashes)
	$(BIN)/python tools/requirements/locks.py update $(if $(UPGRADE),--upgrade)

clean: ## remove caches and build products; runs/ stays
	find . -path './$(VENV)*' -prune -o -path ./runs -prune -o -type d \( -name __pycache__ -o -name build -o -name dist -o -name '*.egg-info' \) -print0 | xargs -0 rm -rf
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

distclean: clean ## clean, and remove .venv and the example's documents; runs/ stays
	rm -rf $(VENV) $(VENV)-torch-* $(TRACKED) $(PEERS) $(SITE) $(GITHUB) $(COVERAGE) $(PYDOC)/documents.jsonl
