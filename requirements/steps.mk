# $(STEP) in a recipe is [17/120]. How many steps there are, a pass of make finds out that runs none,
# with the same values of $(VARIABLES).
ifdef COUNTING
STEP = COUNTED
else
STEPS := $(shell MAKEFLAGS= $(MAKE) -n COUNTING=1 $(foreach name,$(VARIABLES),'$(name)=$($(name))') \
	$(MAKECMDGOALS) 2>/dev/null | grep -c COUNTED)
STEP = $(eval DONE += x)[$(words $(DONE))/$(STEPS)]
endif
