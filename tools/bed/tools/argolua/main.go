// Runs scripts for a kind as Argo CD runs those of its ConfigMap argocd-cm, by Argo CD's own code.
//
// Standard input: {"health": Lua, "discovery": Lua, "actions": {name: Lua}, "objects": [object, …]}.
// Standard output: for each object its health, its actions, and the object that each action would store.
// Called as argosync it makes a namespace what Git has; see sync.go.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	appv1 "github.com/argoproj/argo-cd/v3/pkg/apis/application/v1alpha1"
	"github.com/argoproj/argo-cd/v3/util/lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

type question struct {
	Health    string            `json:"health"`
	Discovery string            `json:"discovery"`
	Actions   map[string]string `json:"actions"`
	Objects   []json.RawMessage `json:"objects"`
}

type answer struct {
	Health  any                       `json:"health"`
	Actions []appv1.ResourceAction    `json:"actions"`
	Results map[string]map[string]any `json:"results"`
}

func main() {
	name, work := filepath.Base(os.Args[0]), run
	if name == "argosync" {
		work = syncOnce
	}
	if err := work(); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		os.Exit(1)
	}
}

func run() error {
	var asked question
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		return err
	}
	definitions := appv1.ResourceActions{ActionDiscoveryLua: asked.Discovery}
	for name, script := range asked.Actions {
		definitions.Definitions = append(
			definitions.Definitions, appv1.ResourceActionDefinition{Name: name, ActionLua: script})
	}
	text, err := yaml.Marshal(definitions)
	if err != nil {
		return err
	}
	override := appv1.ResourceOverride{HealthLua: asked.Health, Actions: string(text)}

	answers := make([]answer, 0, len(asked.Objects))
	for number, raw := range asked.Objects {
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(raw); err != nil {
			return fmt.Errorf("object %d: %w", number, err)
		}
		one, err := judge(object, override, asked.Actions)
		if err != nil {
			return fmt.Errorf("object %d: %w", number, err)
		}
		answers = append(answers, one)
	}
	return json.NewEncoder(os.Stdout).Encode(answers)
}

func judge(
	object *unstructured.Unstructured, override appv1.ResourceOverride, actions map[string]string,
) (answer, error) {
	key := lua.GetConfigMapKey(object.GroupVersionKind())
	overrides := map[string]appv1.ResourceOverride{key: override}
	health, err := lua.ResourceHealthOverrides(overrides).GetResourceHealth(object)
	if err != nil {
		return answer{}, err
	}

	vm := lua.VM{ResourceOverrides: overrides}
	scripts, err := vm.GetResourceActionDiscovery(object)
	if err != nil {
		return answer{}, err
	}
	found, err := vm.ExecuteResourceActionDiscovery(object, scripts)
	if err != nil {
		return answer{}, err
	}

	results := map[string]map[string]any{}
	for name := range actions {
		action, err := vm.GetResourceAction(object, name)
		if err != nil {
			return answer{}, err
		}
		impacted, err := vm.ExecuteResourceAction(object, action.ActionLua)
		if err != nil {
			return answer{}, err
		}
		results[name] = impacted[0].UnstructuredObj.Object
	}
	return answer{health, found, results}, nil
}
