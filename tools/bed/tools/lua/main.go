// Runs scripts as Argo CD v3.0.0 runs those of its users, without Argo CD: the same Lua, with the same few
// libraries. It is built in seconds where argolua, which is Argo CD's own code, takes minutes.
//
// Standard input: {"health": Lua, "discovery": Lua, "actions": {name: Lua}, "objects": [object, …]}.
// Standard output: for each object its health, its actions, and the object that each action would store.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	lua "github.com/yuin/gopher-lua"
	luajson "layeh.com/gopher-json"
)

type question struct {
	Health    string            `json:"health"`
	Discovery string            `json:"discovery"`
	Actions   map[string]string `json:"actions"`
	Objects   []json.RawMessage `json:"objects"`
}

type answer struct {
	Health  json.RawMessage            `json:"health"`
	Actions map[string]any             `json:"actions"`
	Results map[string]json.RawMessage `json:"results"`
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "lua:", err)
		os.Exit(1)
	}
}

func run() error {
	var asked question
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		return err
	}
	answers := make([]answer, 0, len(asked.Objects))
	for number, object := range asked.Objects {
		one, err := judge(asked, object)
		if err != nil {
			return fmt.Errorf("object %d: %w", number, err)
		}
		answers = append(answers, one)
	}
	return json.NewEncoder(os.Stdout).Encode(answers)
}

func judge(asked question, object []byte) (answer, error) {
	var found answer
	var err error
	if found.Health, err = call(object, asked.Health); err != nil {
		return found, err
	}
	actions, err := call(object, asked.Discovery)
	if err != nil {
		return found, err
	}
	if err := json.Unmarshal(actions, &found.Actions); err != nil {
		return found, err
	}
	found.Results = map[string]json.RawMessage{}
	for name, script := range asked.Actions {
		if found.Results[name], err = call(object, script); err != nil {
			return found, err
		}
	}
	return found, nil
}

// call returns the JSON of the table that a script returns for the object obj.
func call(object []byte, script string) ([]byte, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for name, open := range map[string]lua.LGFunction{
		lua.LoadLibName: lua.OpenPackage,
		lua.BaseLibName: lua.OpenBase,
		lua.TabLibName:  lua.OpenTable,
	} {
		function := lua.P{Fn: state.NewFunction(open), Protect: true}
		if err := state.CallByParam(function, lua.LString(name)); err != nil {
			return nil, err
		}
	}

	limit, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	state.SetContext(limit)
	value, err := luajson.Decode(state, object)
	if err != nil {
		return nil, err
	}
	state.SetGlobal("obj", value)
	if err := state.DoString(script); err != nil {
		return nil, err
	}
	result := state.Get(-1)
	if result.Type() != lua.LTTable {
		return nil, fmt.Errorf("the script returns %s, not a table", result.Type())
	}
	return luajson.Encode(result)
}
